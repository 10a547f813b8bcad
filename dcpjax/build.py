"""From a checkpoint folder and a handful of sizes to a runner: every check that can fail does so before weights load."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax import capacity
from dcpjax.attention import AttentionOptions
from dcpjax.cache import PagedCache, make_pool
from dcpjax.collectives import check_backend
from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, make_plan
from dcpjax.runner import Limits, Runner
from models import weights
from models.config import ModelConfig, read_config
from models.glm_moe_dsa import Network


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What the user chose; None means the default described in `dcpjax.llm.LLM`."""

    tensor_parallel_size: int | None = None
    decode_context_parallel_size: int = 1
    interleave: int = 1
    backend: str = "ag_rs"
    index_shards: int | None = None
    draft_kv: str = "sharded"
    block_size: int = 64
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def start_devices(tensor_parallel_size: int | None, dcp: int) -> None:
    """Asks JAX for enough virtual CPU devices, unless a number was chosen or a backend runs already."""
    if jax.config.jax_num_cpu_devices != -1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", max(tensor_parallel_size or dcp, 8))
    except RuntimeError:  # a backend runs: make_plan says what to do if its devices are too few
        return


def keep_compiled_programs() -> None:
    """Compiled programs are kept in the user's cache folder, unless JAX has been given another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "dcpjax" / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def build_runner(folder: pathlib.Path, config: EngineConfig, overrides: dict[str, Any] | None = None) -> Runner:
    """Reads the configuration, checks everything, then loads the weights and makes the pools.

    Raises `ConfigError` or `CheckpointError`.
    """
    cfg = read_config(folder, overrides)
    check_backend(config.backend)
    plan = make_plan(config.tensor_parallel_size, config.decode_context_parallel_size)
    dtype = _choose_dtype(config.dtype, plan)
    kind = _cache_kind(config.kv_cache_dtype, dtype)
    shape = capacity.cache_shape(cfg, plan, kind, config.index_shards, config.draft_kv)
    on_cpu = plan.platform == "cpu"
    seqs = config.max_num_seqs or (16 if on_cpu else 128)
    tokens = config.max_num_batched_tokens or max(512 if on_cpu else 2048, seqs)
    length = _wanted_length(config.max_model_len, cfg)
    # The geometry is checked with one page before the number of pages is known.
    layout = CacheLayout(1, config.block_size, plan.dcp, config.interleave)
    pages = config.num_blocks or capacity.num_pages(
        shape, plan, config.block_size, seqs * length, config.kv_cache_memory_bytes
    )
    length = _fit_length(config.max_model_len, length, pages, config.block_size)
    layout = dataclasses.replace(layout, num_pages=pages)
    net = Network(cfg, plan, AttentionOptions(backend=config.backend))
    params = weights.load(folder, cfg, plan, dtype)

    def pools(num_layers: int, num_index: int, shards: int, first_slot: int) -> PagedCache:
        latent = dataclasses.replace(layout, shards=shards)
        index = dataclasses.replace(layout, shards=min(shards, shape.index_shards))
        return PagedCache(
            make_pool(num_layers, latent, shape.latent, plan),
            make_pool(num_index, index, shape.index, plan),
            first_slot,
        )

    return Runner(
        net,
        params,
        pools(cfg.num_layers, cfg.num_full_layers, plan.dcp, 0),
        pools(1, 1, shape.draft_shards, 1) if cfg.has_mtp else None,
        Limits(seqs, tokens, length),
        cfg.eos_token_ids,
    )


def _choose_dtype(name: str, plan: MeshPlan) -> Any:
    if name == "auto":
        return jnp.float32 if plan.platform == "cpu" else jnp.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; use 'auto', 'bfloat16' or 'float32'")
    return _DTYPES[name]


def _cache_kind(name: str, dtype: Any) -> str:
    if name == "auto":
        return jnp.dtype(dtype).name
    return "fp8" if name == "fp8_e4m3" else name


def _wanted_length(asked: int | None, cfg: ModelConfig) -> int:
    if asked is None:
        return cfg.max_position
    if not 1 <= asked <= cfg.max_position:
        raise ConfigError(f"max_model_len {asked} must be between 1 and the model's {cfg.max_position} positions")
    return asked


def _fit_length(asked: int | None, length: int, pages: int, block_size: int) -> int:
    """The longest sequence: what was asked for, or the smaller of the model's positions and the pool."""
    if pages < 2:
        raise ConfigError(f"num_blocks {pages} is too small: block 0 is never given out, so at least 2 are needed")
    pool = (pages - 1) * block_size
    if asked is None:
        return min(length, pool)
    if asked > pool:
        raise ConfigError(
            f"max_model_len {asked} does not fit the cache of {pages - 1} blocks of {block_size} tokens = {pool}: "
            "lower max_model_len or give the cache more memory"
        )
    return asked
