"""Merging partial attention outputs by their log-sum-exp.

A *part* is the softmax-weighted output of one rank (or tile) over its own keys, with the natural-log LSE of its scores.
Source: online softmax (Milakov and Gimelshein, 2018), applied across parts.
"""

import jax
import jax.numpy as jnp


def merge_parts(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges parts along axis 0: `out [N, …, L]`, `lse [N, …]` float32 → `([…, L] float32, […] float32)`.

    A part without keys has LSE −inf; its output is dropped by select, not by weight, because 0 · NaN is NaN. An LSE
    of NaN or +inf is what a broken part without keys may report and counts as −inf. All parts empty: 0 and −inf.
    """
    weight, total = part_weights(lse)
    merged = jnp.sum(weigh(out, weight), axis=0)
    return merged, total


def part_weights(lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights `exp(lse_r − total)` of the parts along axis 0, and the total LSE."""
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
