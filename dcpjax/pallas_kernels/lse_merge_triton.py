"""LSE merge as one Triton kernel: parts are read once, weighed and summed in the order of their numbers.

It merges the splits of one call's lists and the parts of ranks alike. A program takes a few rows and a slice of their
width; the loop over parts is unrolled, so that all reads are in flight before the first sum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """rows, width: what a program takes. interpret: run by Pallas' interpreter on any platform, for tests."""

    rows: int = 4
    width: int = 512
    warps: int = 4
    interpret: bool = False

    @classmethod
    def choose(cls, rows: int, width: int, interpret: bool = False) -> "MergeConfig":
        """What was fastest on an H200: few rows are cut finer, so that there are programs for the whole chip."""
        if rows <= 2048:
            most = 128 if rows <= 128 else 256 if rows <= 512 else 512
            return cls(rows=1, width=min(most, width), warps=1, interpret=interpret)
        return cls(rows=4, width=width, warps=4, interpret=interpret)


def has_part(width: int) -> bool:
    """Whether the kernel merges parts of `width` values: powers of two, as blocks in Triton are."""
    return not width & (width - 1)


def merge_splits(
    out: jax.Array, lse: jax.Array, *, out_dtype: Any, config: MergeConfig | None = None
) -> tuple[jax.Array, jax.Array]:
    """Merges axis 1 of `out [T, S, H, L]`, `lse [T, S, H]` → `([T, H, L] out_dtype, [T, H] float32)`."""
    tokens, splits, heads, width = out.shape
    parts = out.reshape(-1, width)
    flat_lse = lse.reshape(-1)

    def place(row, part):
        return (row // heads * splits + part) * heads + row % heads

    def read_lse(refs, row, part):
        return refs[1][place(row, part)]

    def read_part(refs, row, part, columns):
        return refs[0][place(row, part), columns].astype(jnp.float32)

    out, lse = _merge(
        (parts, flat_lse), read_lse, read_part, tokens * heads, splits, width, out_dtype, config, "merge_splits"
    )
    return out.reshape(tokens, heads, width), lse.reshape(tokens, heads)


def merge_packed(
    packed: jax.Array, *, width: int, dtype: Any, out_dtype: Any, config: MergeConfig | None = None
) -> jax.Array:
    """Merges axis 0 of parts in the form of `lse_merge.pack_parts`, `[N, T, H, words]` → `[T, H, width] out_dtype`."""
    ranks, tokens, heads, words = packed.shape
    rows = tokens * heads

    def read_lse(refs, row, part):
        at = part * rows + row
        if packed.dtype == jnp.uint32:
            return jax.lax.bitcast_convert_type(refs[0][at, width], jnp.float32)
        low, high = (refs[0][at, width + i].astype(jnp.uint32) for i in range(2))
        return jax.lax.bitcast_convert_type(low | (high << 16), jnp.float32)

    def read_part(refs, row, part, columns):
        return jax.lax.bitcast_convert_type(refs[0][part * rows + row, columns], dtype).astype(jnp.float32)

    flat = (packed.reshape(-1, words),)
    out, _ = _merge(flat, read_lse, read_part, rows, ranks, width, out_dtype, config, "merge_packed")
    return out.reshape(tokens, heads, width)


def _merge(
    arrays: tuple[jax.Array, ...], read_lse: Callable, read_part: Callable,
    rows: int, parts: int, width: int, out_dtype: Any, config: MergeConfig | None, name: str,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel over rows whose parts `read_lse` and `read_part` fetch from `arrays`."""
    config = MergeConfig.choose(rows, width) if config is None else config
    if not has_part(width) or config.width > width:
        raise NotImplementedError(f"merging parts of width {width} in slices of {config.width}: use a power of two")

    def kernel(*refs):
        *inputs, out_ref, lse_ref = refs
        row = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
        row = jnp.minimum(row, rows - 1)  # past the end: the last row once more, with the same bits
        columns = pl.ds(pl.program_id(1) * config.width, config.width)
        scores = [read_lse(inputs, row, part) for part in range(parts)]
        scores = [jnp.where(x < jnp.inf, x, -jnp.inf) for x in scores]
        top = scores[0]
        for score in scores[1:]:
            top = jnp.maximum(top, score)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        mass = jnp.zeros((config.rows,), jnp.float32)
        total = jnp.zeros((config.rows, config.width), jnp.float32)
        for part, score in enumerate(scores):
            weight = jnp.exp(score - top)
            mass += weight
            value = read_part(inputs, row, part, columns)
            # By select: what an empty part left in memory may be NaN.
            total += jnp.where(weight[:, None] > 0, value * weight[:, None], 0.0)
        safe = jnp.where(mass > 0, mass, 1.0)
        out_ref[row, columns] = (total / safe[:, None]).astype(out_dtype)
        lse_ref[row] = jnp.where(mass > 0, top + jnp.log(safe), -jnp.inf)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, config.rows), width // config.width),
        out_shape=[jax.ShapeDtypeStruct((rows, width), out_dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=config.interpret,
        name=name,
    )(*arrays)
