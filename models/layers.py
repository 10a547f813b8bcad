"""Small pure pieces of the network: norms and rotary embedding."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x²) + eps) · weight` of `x […, D]`; statistics in float32 (or x's wider type), then cast back.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Ordinary LayerNorm of `x […, D]` with bias (the indexer's keys); statistics in float32, the result in x's
    dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype) + bias.astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Interleaved rotary embedding of `x [T, …, d]` at `positions [T]`: pairs are (2i, 2i+1), order kept.

    Angles are float32 products, also at a million positions; cos and sin are then cast to x's dtype. Source: Su et al.,
    RoFormer (2021).
    """
    d = x.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = theta ** (-jnp.arange(0, d, 2, dtype=wide) / d)
    angle = positions.astype(wide).reshape(-1, *(1,) * (x.ndim - 1)) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
