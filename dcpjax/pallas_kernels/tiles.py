"""Tiles of stored matrices times tokens, for Triton kernels that read weights once, in the form that they are stored in.

FP8 tiles are multiplied in the tokens' dtype and their products scaled, since a tile lies within one block of scales; NVFP4
numbers are scaled by their group first, which is exact in 16 bits.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.pallas_kernels.float16_triton import hidden_float16, tokens_float16
from dcpjax.quant import QArray, unpack_e2m1

# Offsets into arrays of bytes are signed 32-bit numbers up to 4 GiB, where they become 64-bit ones.
_BAD_BYTES = range(1 << 31, 1 << 32)
# Triton multiplies by no fewer tokens.
LONE = 16


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
    arrays = (stack.values, stack.scales)
    return whole and not any(a.dtype.itemsize == 1 and math.prod(a.shape) in _BAD_BYTES for a in arrays)


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


def in_float16(dtype: Any, stack: jax.Array | QArray) -> bool:
    """Whether tokens of `dtype` meet this stack `[…, out, in]` as float16, into which bytes are widened by fewer instructions
    than into bfloat16. It costs a pass over the tokens, which FP8 does without: its conversions take less time than its bytes."""
    return dtype == jnp.bfloat16 and isinstance(stack, QArray) and stack.packed


def prepared(x: jax.Array, stack: jax.Array | QArray, interpret: bool = False) -> tuple[jax.Array, jax.Array | None]:
    """`x [T, in]` as `product` reads it for this stack, and what the products must be multiplied by: float32 `[T]`, or None.

    For bytes that hold two columns, the even columns come first, then the odd ones.
    """
    if not isinstance(stack, QArray) or not stack.packed:
        return x, None
    if in_float16(x.dtype, stack):
        return tokens_float16(x, interpret)
    return x.reshape(len(x), -1, 2).swapaxes(1, 2).reshape(x.shape), None


def prepared_hidden(
    both: jax.Array, pairs: int, dtype: Any, stack: jax.Array | QArray, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """`prepared` of `silu(gate) · up` in `dtype`, for the first `pairs` rows of `both [2, splits, ≥ pairs, in]`, the products
    for gate and for up as sums in parts."""
    if in_float16(dtype, stack):
        return hidden_float16(both, pairs, interpret)
    # Rounded as the products of whole matrices are.
    gate, up = both[:, :, :pairs].sum(1).astype(dtype).astype(jnp.float32)
    return prepared((jax.nn.silu(gate) * up).astype(dtype), stack, interpret)


def reader(tokens: Any, row: jax.Array, real: jax.Array) -> Callable:
    """`read` for `product`: rows `row [n]` of the reference `tokens`, zeros where they are not `real`, which are not read: beside
    bytes of weights the values of tokens are no small part."""

    def read(start, size):
        column = start + jnp.arange(size, dtype=jnp.int32)
        mine = jnp.broadcast_to(real[:, None], (len(real), size))
        return plt.load(tokens.at[row[:, None], column[None]], mask=mine, other=0)

    return read


def lone_reader(tokens: Any, row: jax.Array) -> Callable:
    """`read` for `product` of one token, the scalar `row` of the reference `tokens [T, in]`, `LONE` times: as rows of a tile it
    would take up the room of weights."""

    def read(start, size):
        values = plt.load(tokens.at[row, start + jnp.arange(size, dtype=jnp.int32)])
        return jnp.broadcast_to(values[None], (LONE, size))

    return read


def product(
    total: jax.Array, w: Any, place: tuple[jax.Array, ...], begin: jax.Array, size: int, step: jax.Array, depth: int,
    read: Callable, interpret: bool,
) -> jax.Array:  # fmt: skip
    """`total [size, tokens]` float32 and `size` rows from `begin` of the matrix at `place` of the stack of references `w`, times
    the values of a step of `depth` along the sum. `whole` ends the sum.

    `read(start, size)` gives values `[tokens, size]` of the tokens that `prepared` made. Raises `NotImplementedError` for
    tiles that cross blocks of scales.
    """
    first, across = step * depth, pl.ds(begin, size)
    if not isinstance(w, QArray):
        return total + _dot(w[*place, across, pl.ds(first, depth)], read(first, depth))
    if not w.packed:
        if w.block[0] % size or w.block[1] % depth:
            raise NotImplementedError(
                f"a tile of {size} × {depth} crosses blocks of {w.block}: choose divisors of these"
            )
        scale = w.scales[*place, begin // w.block[0], first // w.block[1]]
        values, tokens = w.values[*place, across, pl.ds(first, depth)], read(first, depth)
        # To bfloat16 by float32: those conversions run at several times the rate of the direct one.
        return total + scale * _dot(values.astype(jnp.float32) if tokens.dtype == jnp.bfloat16 else values, tokens)
    half, groups = depth // 2, depth // w.block[1]
    packed = w.values[*place, across, pl.ds(step * half, half)]
    scales = w.scales[*place, across, pl.ds(step * groups, groups)].astype(jnp.float32)
    start, middle = step * half, w.values.shape[-1]
    low, high = read(start, half), read(start + middle, half)
    if interpret or low.dtype != jnp.float16:
        scales = _spread(scales, half)
        even, odd = (number * scales for number in unpack_e2m1(packed))
        return total + _dot(even, low) + _dot(odd, high)
    even, odd = _scaled_e2m1(packed, _spread(scales.astype(jnp.float16), half))
    return total + _dot(even, low) + _dot(odd, high)


def whole(w: Any, place: tuple[jax.Array, ...], total: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """`total [size, tokens]` float32, a sum of `product`s with tokens of `dtype`, times what the matrix at `place` of the stack
    of references `w` is to be multiplied by."""
    if not isinstance(w, QArray) or not w.packed:
        return total
    return total * (w.factor[*place] * (2.0**DOWN if not interpret and dtype == jnp.float16 else 1))


def _dot(weights, values):
    """`[size, depth]` times `[tokens, depth]`: `[size, tokens]` float32."""
    exact = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    return plt.dot(weights.astype(values.dtype), values, trans_b=True, precision=exact)


def _spread(scales, size):
    """Scales `[rows, groups]` for each of `size` bytes of a row."""
    rows, groups = scales.shape
    return jnp.broadcast_to(scales[:, :, None], (rows, groups, size // groups)).reshape(rows, size)


# A number of e2m1 whose bits stand in the lowest exponent bits and the highest mantissa bit of float16 is 2^-14 of itself
# there, the subnormal one too. Those bits are in the upper byte, so four are made at once. Products with scales of e4m3 are
# multiples of 2^-24, the least of float16, and so exact.
DOWN = 14
# Four bytes, and two times two scales, to the numbers in the low halves, two in a register. Results are written when all has
# been read: they may be given a register of what is read.
LOW = """
{
.reg .b32 a, b;
shl.b32 a, $2, 1;
shl.b32 b, $2, 4;
and.b32 a, a, 0x0E0E0E0E;
lop3.b32 a, b, 0x80808080, a, 0xEA;
prmt.b32 b, a, 0, 0x1404;
prmt.b32 a, a, 0, 0x3424;
mul.f16x2 b, b, $3;
mul.f16x2 a, a, $4;
mov.b32 $0, b;
mov.b32 $1, a;
}
"""
# In the high halves the sign is in its place already.
HIGH = LOW.replace("shl.b32 a, $2, 1;\nshl.b32 b, $2, 4;\n", "shr.u32 a, $2, 3;\n").replace("a, b, 0x8", "a, $2, 0x8")


def _scaled_e2m1(packed, scales):
    """Numbers in the low and in the high half of `packed [rows, n]` times `scales [rows, n]`, and 2^-14: two of float16."""
    result = [jax.ShapeDtypeStruct(packed.shape, jnp.float16)]
    kind = {"args": [packed, scales], "constraints": "=r,=r,r,r,r", "pack": 4, "result_shape_dtypes": result}
    return plt.elementwise_inline_asm(LOW, **kind)[0], plt.elementwise_inline_asm(HIGH, **kind)[0]
