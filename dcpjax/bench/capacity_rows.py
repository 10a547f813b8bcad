"""Tokens that GLM-5.2's caches hold on one device, from the pools' shapes alone: no memory is taken."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax import build, capacity
from dcpjax.cache import PagedCache, Pool, Record, make_pool, pool_spec
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, make_plan
from models.config import ModelConfig, from_hf
from models.published import GLM_5_2

GIB = 1 << 30
DEVICE_BYTES = 35 * GIB
PAGE_TOKENS = 64
RECORD = "fp8"


def measure(dcp: int, draft_kv: str, device_bytes: int = DEVICE_BYTES) -> dict[str, Any]:
    """kv_tokens: of whole pages, the dummy page not counted. bytes_per_token: on one device, `allocated` by the shapes of
    the pools and `formula` by `CacheShape`."""
    cfg, plan = from_hf(GLM_5_2), make_plan(dcp, dcp)
    shape = capacity.cache_shape(cfg, plan, RECORD, None, draft_kv)
    allocated = functools.partial(_bytes, cfg, shape, plan)
    page = allocated(2) - allocated(1)
    pages = device_bytes // page
    assert allocated(pages) <= device_bytes < allocated(pages + 1)
    return {
        "kv_tokens": (pages - 1) * PAGE_TOKENS,
        "bytes_per_token": {"allocated": page / PAGE_TOKENS, "formula": shape.bytes_per_token()},
    }


def _bytes(cfg: ModelConfig, shape: capacity.CacheShape, plan: MeshPlan, num_pages: int) -> int:
    """Bytes on one device of all pools of target and draft."""
    caches = build.make_caches(cfg, shape, CacheLayout(num_pages, PAGE_TOKENS, plan.dcp), plan, _abstract)
    return sum(_device_bytes(pool, plan) for cache in caches if cache is not None for pool in _pools(cache))


def _abstract(num_layers: int, layout: CacheLayout, record: Record, plan: MeshPlan) -> Pool:
    return jax.eval_shape(functools.partial(make_pool, num_layers, layout, record, plan))


def _pools(cache: PagedCache) -> tuple[Pool, Pool]:
    return cache.latent, cache.index


def _device_bytes(pool: Pool, plan: MeshPlan) -> int:
    sharding = jax.sharding.NamedSharding(plan.mesh, pool_spec(pool.layout, plan))
    return math.prod(sharding.shard_shape(pool.data.shape)) * jnp.dtype(pool.data.dtype).itemsize
