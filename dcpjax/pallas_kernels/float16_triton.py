"""Tokens for matrices of four-bit numbers: in float16, and even columns before odd ones, by one small Triton kernel.

XLA makes several of it, which takes longer than a token's share of them is worth: the largest number of a row is needed
before the first can be written.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def tokens_float16(x: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """`x [T, D]` bfloat16 → float16 `[T, D]` and float32 `[T]`, by which products with it must be multiplied. D is even.

    Each token is scaled by a power of two that keeps its numbers exact, but for those below 2^-30 of its largest.
    """
    return _rows(x, *x.shape, _plain, interpret, "tokens_float16")


def hidden_float16(both: jax.Array, pairs: int, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The same of `silu(gate) · up`, for the first `pairs` rows of `both [2, splits, ≥ pairs, I]`, gate's and up's sums in parts,
    each of them rounded once: to float16's eleven bits."""
    return _rows(both, pairs, both.shape[-1], _gated, interpret, "hidden_float16")


def _plain(row, column, real, x):
    return plt.load(x.at[row, column], mask=real, other=0).astype(jnp.float32)


def _gated(row, column, real, both):
    def total(which):
        parts = (plt.load(both.at[which, s, row, column], mask=real, other=0) for s in range(both.shape[1]))
        return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))

    return jax.nn.silu(total(0)) * total(1)


def _rows(x: jax.Array, rows: int, width: int, values: Callable, interpret: bool, name: str):
    """A program a row; `values(row, column, real, reference)` gives float32 numbers of it."""

    def kernel(source, out, factor):
        row, column = pl.program_id(0), jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        real = column < width
        numbers = values(row, column, real, source)
        largest = jnp.max(jnp.abs(numbers))
        # It becomes 2^13 or more, and less than 2^14; that of a token that is next to nothing, less.
        up = 14 - jnp.maximum((jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 126, -100)
        # Written apart rather than read apart: nothing waits for what is written.
        at = (column & 1) * (width // 2) + (column >> 1)
        plt.store(out.at[row, at], (numbers * _power(up)).astype(jnp.float16), mask=real)
        factor[row] = _power(-up)

    return pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[pl.BlockSpec(x.shape, lambda i: (0,) * x.ndim)],
        out_specs=[pl.BlockSpec((rows, width), lambda i: (0, 0)), pl.BlockSpec((rows,), lambda i: (0,))],
        out_shape=[jax.ShapeDtypeStruct((rows, width), jnp.float16), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name=name,
    )(x)


def _power(exponent: jax.Array) -> jax.Array:
    """Two to the `exponent […]` int32, between −126 and 127: float32, exact on every platform."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
