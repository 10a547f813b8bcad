"""Sparse MLA over cached rows: absorbed attention of each token over its own list of rows, with LSE.

The absorbed form has one key/value head: a cache row is `[latent | rotated key]`, the key is the whole row and the value
its first `value_width` entries (DeepSeek-V2, section 2.1). The reference here runs on every platform.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels.mosaic_config import MosaicMLAConfig, has_shape, is_ahead
from dcpjax.pallas_kernels.records import unpack_rows
from dcpjax.pallas_kernels.sparse_mla_triton import SparseMLAConfig, sparse_mla_triton

# Bytes of gathered rows held at once; more tokens are taken tile by tile.
_TILE_BYTES = 1 << 26


def fitting(
    backend: str, shape: tuple[int, int, int], value_width: int, dtype: Any, out_dtype: Any, width: int,
    invariant: bool = False,
) -> tuple[str, SparseMLAConfig | MosaicMLAConfig | None]:  # fmt: skip
    """The backend that serves queries of `shape` = tokens, heads and width over rows in `dtype`, and its config.

    "mosaic" is meant where it was measured to be ahead of "triton", which serves the rest: output in bfloat16, for one.
    Others stay what they are. width: rows that a list may be expected to hold.
    """
    tokens, heads, columns = shape
    if backend == "xla":
        return backend, None
    packed = dtype == jnp.uint32
    here = has_shape(heads, value_width, columns - value_width, dtype) and out_dtype == jnp.bfloat16
    if backend == "mosaic" and here and is_ahead(tokens, heads, width, packed, invariant):
        return backend, MosaicMLAConfig.choose(tokens, heads, width, packed=packed, invariant=invariant)
    config = SparseMLAConfig.choose(tokens, heads, width, packed=packed, invariant=invariant)
    return "triton" if backend == "mosaic" else backend, config


def sparse_mla(
    q: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    count: jax.Array,
    *,
    value_width: int,
    scale: float,
    out_dtype: Any = jnp.float32,
    config: SparseMLAConfig | MosaicMLAConfig | None = None,
    backend: str = "xla",
    invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of `q [T, H, W]` over the first `count [T]` entries of `rows [T, K]` in `pool [layers, rows, W]`.

    `pool` may also be `[layers, rows, words]` uint32, records of `records.pack_rows`.
    Returns `out [T, H, value_width]` in out_dtype and the natural-log LSE `[T, H]` float32. A token with count 0 gives
    exactly 0 and −inf. Entries of `rows` past the count may hold anything; what lies in the pool there is not read.

    backend: "xla", "triton" (GPUs), "mosaic" (Hopper GPUs), or "interpret": the Triton kernel on any platform, slowly.
    config: of the kernel, by default the one measured best for the shape. invariant: the kernel's bits for a token do not
    depend on the others.
    Raises `NotImplementedError` where the backend has not the shape or the dtype.
    """
    packed = pool.dtype == jnp.uint32
    if backend == "mosaic":
        if config is None:
            config = MosaicMLAConfig.choose(*q.shape[:2], rows.shape[1], packed=packed, invariant=invariant)
        # Not before it is needed: it brings a compiler along.
        from dcpjax.pallas_kernels.sparse_mla_mosaic import sparse_mla_mosaic

        return sparse_mla_mosaic(
            q, pool, layer, rows, count, value_width=value_width, scale=scale, out_dtype=out_dtype, config=config
        )
    if backend != "xla":
        if config is None:
            config = SparseMLAConfig.choose(*q.shape[:2], rows.shape[1], packed=packed, invariant=invariant)
        config = dataclasses.replace(config, interpret=backend == "interpret")
        return sparse_mla_triton(
            q, pool, layer, rows, count, value_width=value_width, scale=scale, out_dtype=out_dtype, config=config
        )

    def some(q, rows, count):
        out, lse = _attend(q, pool, layer, rows, count, value_width, scale)
        return out.astype(out_dtype), lse

    tile = _tile(rows.shape, pool)
    if tile == rows.shape[0]:
        return some(q, rows, count)

    def cut(x):
        return x.reshape(-1, tile, *x.shape[1:])

    out, lse = jax.lax.map(lambda args: some(*args), (cut(q), cut(rows), cut(count)))
    return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[-1])


def _tile(shape: tuple[int, int], pool: jax.Array) -> int:
    """Tokens a tile: the largest divisor of T whose gathered rows fit."""
    tokens, width = shape
    most = max(1, _TILE_BYTES // (width * pool.shape[-1] * pool.dtype.itemsize))
    return tokens if tokens <= most else math.gcd(tokens, 1 << (most.bit_length() - 1))


def _attend(q, pool, layer, rows, count, value_width, scale):
    valid = jnp.arange(rows.shape[1])[None, :] < count[:, None]
    keys = pool[layer, jnp.where(valid, rows, 0)]
    if pool.dtype == jnp.uint32:
        keys = unpack_rows(keys, value_width, q.shape[2] - value_width)
    keys = keys.astype(q.dtype)
    # Rows that are not selected may hold anything, NaN included.
    keys = jnp.where(valid[..., None], keys, 0)
    highest = jax.lax.Precision.HIGHEST
    score = jnp.einsum("thw,tkw->thk", q, keys, precision=highest, preferred_element_type=jnp.float32) * scale
    score = jnp.where(valid[:, None, :], score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(score - top)
    mass = jnp.sum(weight, axis=-1)
    empty = mass == 0
    safe = jnp.where(empty, 1.0, mass)
    out = jnp.einsum(
        "thk,tkl->thl",
        (weight / safe[..., None]).astype(q.dtype),
        keys[..., :value_width],
        precision=highest,
        preferred_element_type=jnp.float32,
    )
    return out, jnp.where(empty, -jnp.inf, top[..., 0] + jnp.log(safe))
