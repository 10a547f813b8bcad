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
    """Whether kernels can read a stack `[…, out, in]` as it is: all plain ones, quantised ones of whole tiles."""
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
    """The largest power of two up to `most` that divides `size`. Raises `NotImplementedError` where it is less than 16."""
    block = min(size & -size, most)
    if block < 16:
        raise NotImplementedError(f"{size} {what}: the kernel takes multiples of 16; use backend xla")
    return block


def block_of(stack: jax.Array | QArray) -> tuple[int, int]:
    """Rows and columns of a scale of `[…, out, in]` that a tile must not cross; 0: any."""
    if not isinstance(stack, QArray):
        return 0, 0
    return (0, 0) if stack.packed else stack.block


def arranged(x: jax.Array, stack: jax.Array | QArray) -> jax.Array:
    """`x [T, in]` with its columns in the order in which `product` reads them for this stack: a byte holds two columns, so the
    even ones come first, then the odd ones."""
    if not isinstance(stack, QArray) or not stack.packed:
        return x
    return x.reshape(len(x), -1, 2).swapaxes(1, 2).reshape(x.shape)


def product(
    w: Any, place: tuple[jax.Array, ...], begin: jax.Array, size: int, step: jax.Array, depth: int, read: Callable,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """`size` rows from `begin` of the matrix at `place` of the stack of references `w`, times the values of a step of `depth`
    along the sum: `[size, tokens]` float32.

    `read(start, size)` gives values `[tokens, size]` of the tokens as `arranged` put them.
    """
    first, across = step * depth, pl.ds(begin, size)
    if not isinstance(w, QArray):
        return _dot(w[*place, across, pl.ds(first, depth)], read(first, depth))
    if not w.packed:
        scale = w.scales[*place, begin // w.block[0], first // w.block[1]]
        # By float32: its conversions run at several times the rate of the direct one.
        values = w.values[*place, across, pl.ds(first, depth)].astype(jnp.float32)
        return scale * _dot(values, read(first, depth))
    half, groups = depth // 2, depth // w.block[1]
    packed = w.values[*place, across, pl.ds(step * half, half)]
    scales = w.scales[*place, across, pl.ds(step * groups, groups)].astype(jnp.float32)
    start, middle = step * half, w.values.shape[-1]
    low, high = read(start, half), read(start + middle, half)
    if interpret or low.dtype != jnp.bfloat16:
        scales = _spread(scales, half)
        even, odd = (number * scales for number in unpack_e2m1(packed))
        return w.factor[*place] * (_dot(even, low) + _dot(odd, high))
    even, odd = _scaled_e2m1(packed, _spread((scales * 2.0**UP).astype(jnp.bfloat16), half))
    return w.factor[*place] * 2.0 ** (DOWN - UP) * (_dot(even, low) + _dot(odd, high))


def _dot(weights, values):
    """`[size, depth]` times `[tokens, depth]`: `[size, tokens]` float32."""
    exact = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    return plt.dot(weights.astype(values.dtype), values, trans_b=True, precision=exact)


def _spread(scales, size):
    """Scales `[rows, groups]` for each of `size` bytes of a row."""
    rows, groups = scales.shape
    return jnp.broadcast_to(scales[:, :, None], (rows, groups, size // groups)).reshape(rows, size)


# A number of e2m1 whose bits stand in a bfloat16's highest mantissa and lowest exponent bits is 2^-126 of itself there, the
# subnormal one too. Its product with a scale that is 2^118 times too large fits, and is exact.
DOWN, UP = 126, 118
# Four bytes, and two times two scales, to the numbers in the low halves, two in a register. Results are written when all has
# been read: they may be given a register of what is read.
LOW = """
{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 2;
shr.u32 d, b, 2;
shl.b32 a, a, 4;
shl.b32 b, b, 4;
and.b32 c, c, 0x01C001C0;
and.b32 d, d, 0x01C001C0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.bf16x2 a, a, $3;
mul.bf16x2 b, b, $4;
mov.b32 $0, a;
mov.b32 $1, b;
}
"""
# In the high halves the sign is in its place already.
HIGH = LOW.replace("shl.b32 a, a, 4;\nshl.b32 b, b, 4;\n", "").replace("a, 2;", "a, 6;").replace("b, 2;", "b, 6;")


def _scaled_e2m1(packed, scales):
    """Numbers in the low and in the high half of `packed [rows, n]` times `scales [rows, n]`, and 2^-126: two of bfloat16."""
    result = [jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)]
    kind = {"args": [packed, scales], "constraints": "=r,=r,r,r,r", "pack": 4, "result_shape_dtypes": result}
    return plt.elementwise_inline_asm(LOW, **kind)[0], plt.elementwise_inline_asm(HIGH, **kind)[0]
