"""Tiles of stored matrices times tokens, for Triton kernels that read weights once, in the form that they are stored in.

FP8 tiles are multiplied in the tokens' dtype and their products scaled, since a tile lies within one block of scales; NVFP4
numbers are scaled by their group first, which is exact in bfloat16.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.quant import QArray, unpack_e2m1

# Offsets into arrays of bytes are signed 32-bit numbers up to 4 GiB, where they become 64-bit ones.
_BAD_BYTES = range(1 << 31, 1 << 32)


def served(stack: jax.Array | QArray) -> bool:
    """Whether the kernel can read this stack as it is."""
    if not isinstance(stack, QArray):
        return True
    sizes, least = stack.shape[-2:], 16
    if stack.packed:
        # Two halves of a step along the sum.
        whole = sizes[0] % least == 0 and sizes[1] % (2 * least) == 0
    else:
        whole = all(math.gcd(size, block) >= least for size, block in zip(sizes, stack.block, strict=True))
    return whole and math.prod(stack.values.shape) not in _BAD_BYTES


def fit(most: int, size: int, what: str) -> int:
    """The largest power of two up to `most` that divides `size`; at least 16."""
    block = min(size & -size, most)
    if block < 16:
        raise NotImplementedError(f"{size} {what}: the kernel takes multiples of 16; use backend xla")
    return block


def block_of(stack: jax.Array | QArray) -> tuple[int, int]:
    """Rows and columns of a scale that a tile must not cross; 0: any."""
    if not isinstance(stack, QArray):
        return 0, 0
    return (0, 0) if stack.packed else stack.block


def _dot(weights, values):
    """`[size, depth]` times `[tokens, depth]`: `[size, tokens]` float32."""
    exact = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    return plt.dot(weights.astype(values.dtype), values, trans_b=True, precision=exact)


def arranged(x: jax.Array, stack: jax.Array | QArray) -> jax.Array:
    """`x [T, in]` with its columns in the order in which `product` reads them for this stack: a byte holds two columns, so the
    even ones come first, then the odd ones."""
    if not isinstance(stack, QArray) or not stack.packed:
        return x
    return x.reshape(len(x), -1, 2).swapaxes(1, 2).reshape(x.shape)


def product(
    w: Any, place: tuple[jax.Array, ...], begin: jax.Array, size: int, step: jax.Array, depth: int, read: Callable
) -> jax.Array:
    """`size` rows from `begin` of the matrix at `place` of the stack of references `w`, times the values of a step of `depth`
    along the sum: `[size, tokens]` float32.

    `read(start, size)` gives values `[tokens, size]` of the tokens as `arranged` put them.
    """
    first, across = step * depth, pl.ds(begin, size)
    if not isinstance(w, QArray):
        return _dot(w[*place, across, pl.ds(first, depth)], read(first, depth))
    if not w.packed:
        scale = w.scales[*place, begin // w.block[0], first // w.block[1]]
        return scale * _dot(w.values[*place, across, pl.ds(first, depth)], read(first, depth))
    half, wide = depth // 2, read(0, 16).dtype
    groups, columns = depth // w.block[1], w.block[1] // 2
    packed = w.values[*place, across, pl.ds(step * half, half)]
    scales = w.scales[*place, across, pl.ds(step * groups, groups)].astype(jnp.float32)
    scales = jnp.broadcast_to(scales[:, :, None], (size, groups, columns)).reshape(size, half)
    even, odd = ((number * scales).astype(wide) for number in unpack_e2m1(packed))
    start, middle = step * half, w.values.shape[-1]
    return w.factor[*place] * (_dot(even, read(start, half)) + _dot(odd, read(start + middle, half)))
