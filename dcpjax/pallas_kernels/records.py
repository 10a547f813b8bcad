"""The packed record of a cached row: 8-bit values with a scale a group, then a rotated key in bfloat16, in 32-bit words.

A latent row of 512 + 64 values takes 164 words, 656 bytes: 128 of latent, 4 of scales, 32 of key. An index key of 128
values has one group and no rotated key of its own: 33 words, 132 bytes. Byte i of a word is of quarter i of the values,
and halves of a word are of halves of the key: a kernel takes a word apart by shifts, and the pieces stay together with
their scales. Whole words, because kernels compute offsets in elements, in 32 bits with sign: a pool of bytes between 2
and 4 GiB would be read at negative ones.
"""

import jax
import jax.numpy as jnp

# Values that share a scale.
GROUP = 128
_LARGEST = 448.0  # of float8_e4m3fn
# Of a scale's exponent: the kernel for Hopper multiplies scales with 2¹²⁰ before it applies them.
_MOST_EXPONENT = 7


def scale_groups(value_width: int) -> int:
    """Scales of a record."""
    return -(-value_width // GROUP)


def has_record(value_width: int, rope: int = 0) -> bool:
    """Whether rows of these widths can be packed: whole words, and whole groups where there are several."""
    return value_width % 4 == 0 and rope % 2 == 0 and (value_width < GROUP or value_width % GROUP == 0)


def packed_words(value_width: int, rope: int = 0) -> int:
    """32-bit words of a record of `value_width` values and a rotated key of `rope`."""
    return value_width // 4 + scale_groups(value_width) + rope // 2


def pack_rows(rows: jax.Array, value_width: int) -> jax.Array:
    """`rows [..., value_width + rope]` → records `[..., words]` uint32; for widths that `has_record`.

    Scales are powers of two, so that a row which is packed again is the same; 2⁷ at most, so that what is larger than 57,344
    becomes that. What is not finite becomes NaN.
    """
    value = rows[..., :value_width].astype(jnp.float32)
    lead, groups = value.shape[:-1], scale_groups(value_width)
    parts = value.reshape(*lead, groups, -1)
    largest = jnp.max(jnp.abs(parts), axis=-1)
    # frexp: largest / 448 = m · 2^e with m in [0.5, 1); 2^e is the least power of two that is large enough, or twice it.
    mantissa, exponent = jnp.frexp(largest / _LARGEST)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = jnp.minimum(exponent, _MOST_EXPONENT)
    scale = jnp.where(largest > 0, jnp.ldexp(jnp.float32(1), exponent), 1.0)
    parts = jnp.where(jnp.isfinite(parts), jnp.clip(parts / scale[..., None], -_LARGEST, _LARGEST), jnp.nan)
    parts = parts.astype(jnp.float8_e4m3fn)
    quarters = jnp.moveaxis(parts.reshape(*lead, 4, -1), -2, -1)
    words = [quarters, scale]
    if rows.shape[-1] > value_width:
        words.append(jnp.moveaxis(rows[..., value_width:].astype(jnp.bfloat16).reshape(*lead, 2, -1), -2, -1))
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint32) for x in words], axis=-1)


def unpack_rows(records: jax.Array, value_width: int, rope: int = 0) -> jax.Array:
    """Records `[..., words]` uint32 → rows `[..., value_width + rope]` float32."""
    lead, groups, cut = records.shape[:-1], scale_groups(value_width), value_width // 4
    quarters = jax.lax.bitcast_convert_type(records[..., :cut], jnp.float8_e4m3fn)
    value = jnp.moveaxis(quarters, -1, -2).reshape(*lead, groups, -1).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type(records[..., cut : cut + groups], jnp.float32)
    value = (value * scale[..., None]).reshape(*lead, value_width)
    if not rope:
        return value
    halves = jax.lax.bitcast_convert_type(records[..., cut + groups :], jnp.bfloat16)
    key = jnp.moveaxis(halves, -1, -2).reshape(*lead, rope).astype(jnp.float32)
    return jnp.concatenate([value, key], axis=-1)
