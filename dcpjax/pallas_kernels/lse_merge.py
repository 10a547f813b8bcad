"""Merging partial attention outputs by their log-sum-exp.

A *part* is the softmax-weighted output of one rank (or tile) over its own keys, with the natural-log LSE of its scores.
Source: online softmax (Milakov and Gimelshein, 2018), applied across parts.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels import lse_merge_triton
from dcpjax.pallas_kernels.lse_merge_triton import MergeConfig


def merge_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges parts along axis 0: `out [N, …, L]`, `lse [N, …]` float32 → `([…, L] float32, […] float32)`.

    A part without keys has LSE −inf; its output is dropped by select, not by weight, because 0 · NaN is NaN. An LSE
    of NaN or +inf is what a broken part without keys may report and counts as −inf. All parts empty: 0 and −inf.

    >>> whole, lse = merge_parts(jnp.array([[1.0], [4.0], [jnp.nan]]), jnp.log(jnp.array([2.0, 1.0, 0.0])))
    >>> round(float(whole[0]), 3), round(float(jnp.exp(lse)), 3)  # (2 · 1 + 1 · 4) / 3, over 3
    (2.0, 3.0)
    """
    weight, total = part_weights(lse)
    merged = jnp.sum(weigh(out, weight), axis=0)
    return merged, total


def part_weights(lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights `exp(lse_r − total)` `[N, …]` of the parts along axis 0 of `lse [N, …]`, and the total `[…]`; all
    float32."""
    lse = jnp.where(jnp.isnan(lse) | (lse == jnp.inf), -jnp.inf, lse.astype(jnp.float32))
    top = jnp.max(lse, axis=0)
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(lse - safe_top)
    mass = jnp.sum(weight, axis=0)
    weight = weight / jnp.where(mass == 0, 1.0, mass)
    return weight, jnp.where(mass == 0, -jnp.inf, safe_top + jnp.log(jnp.where(mass == 0, 1.0, mass)))


def weigh(out: jax.Array, weight: jax.Array) -> jax.Array:
    """`out […, L]` times `weight […]` in float32; exactly 0 where the weight is 0, whatever `out` holds there."""
    weight = weight[..., None]
    return jnp.where(weight > 0, out.astype(jnp.float32) * weight, 0.0)


def pack_parts(out: jax.Array, lse: jax.Array) -> jax.Array:
    """`out [T, H, L]` and its `lse [T, H]` float32 in one array of words `[T, H, L + n]`, bit for bit.

    uint32 words for a float32 output, else uint16; the LSE is the last one or two. One array is one collective.
    """
    word = jnp.uint32 if out.dtype == jnp.float32 else jnp.uint16
    lse_words = jax.lax.bitcast_convert_type(lse.astype(jnp.float32), word).reshape(*lse.shape, -1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(out, word), lse_words], axis=-1)


def merge_packed(
    packed: jax.Array, width: int, dtype: Any, *, out_dtype: Any = jnp.float32, config: MergeConfig | None = None,
    backend: str = "xla",
) -> jax.Array:  # fmt: skip
    """Merges axis 0 of `packed [N, T, H, words]`, parts of `dtype` from `pack_parts`, to `[T, H, width]` out_dtype.

    backend: "xla", "triton" (GPUs), or "interpret": that kernel on any platform, slowly. Raises `NotImplementedError`
    where the kernel has not the width.
    """
    if backend != "xla":
        if config is None:
            config = MergeConfig.choose(packed.shape[1] * packed.shape[2], width, backend == "interpret")
        return lse_merge_triton.merge_packed(packed, width=width, dtype=dtype, out_dtype=out_dtype, config=config)
    parts = jax.lax.bitcast_convert_type(packed[..., :width], dtype)
    tail = packed[..., width:]
    lse = jax.lax.bitcast_convert_type(tail[..., 0] if packed.dtype == jnp.uint32 else tail, jnp.float32)
    return merge_parts(parts, lse)[0].astype(out_dtype)
