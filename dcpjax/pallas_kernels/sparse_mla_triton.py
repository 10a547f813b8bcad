"""Sparse MLA with LSE as a Triton kernel: one program is some heads of one token over one split of its list.

The number of rows in a list, not its width, decides where it is split and when the loop ends. The online softmax is that
of Milakov and Gimelshein (2018); splits are merged by LSE in a second kernel, in order, so the bits repeat.
"""

import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.pallas_kernels.lse_merge_triton import MergeConfig, merge_splits
from dcpjax.pallas_kernels.records import GROUP, packed_words, scale_groups

_LOG2_E = 1.0 / math.log(2.0)
# Lower than any score; not −inf, whose difference with itself is NaN.
_LOWEST = -1e30
# Rows of a split when the bits of a token must not depend on the other tokens.
_INVARIANT_ROWS = 512


@dataclasses.dataclass(frozen=True)
class SparseMLAConfig:
    """splits: parts a list is cut into; by its count, unless split_rows fixes how many rows a part has. rows, heads: a
    program's tile. stages: reads under way at once. interpret: run by Pallas' interpreter on any platform, for tests."""

    splits: int = 8
    split_rows: int | None = None
    rows: int = 64
    heads: int = 16
    warps: int = 4
    stages: int = 2
    interpret: bool = False

    @classmethod
    def choose(
        cls, tokens: int, heads: int, width: int, *, packed: bool = False, invariant: bool = False
    ) -> "SparseMLAConfig":  # fmt: skip
        """What was fastest on an H200 for lists of 512 and 2048 rows. `invariant`: the same for every number of tokens.

        `width`: rows that a list may be expected to hold; no more splits are made than there are tiles in it.
        """
        if invariant:
            return cls(split_rows=_INVARIANT_ROWS, heads=16 if heads < 32 else 32)
        table = next(table for most, table in _FASTEST if heads <= most)
        splits, block, warps, stages = next(best for most, *best in table if tokens <= most)
        if packed and block > 32:  # taking words apart needs the registers
            block, warps, stages = 32, 4, 2
        splits = max(1, min(splits, pl.cdiv(width, cls.rows)))
        return cls(splits=splits, heads=block, warps=warps, stages=stages)


_ANY = sys.maxsize
# Up to so many heads: up to so many tokens: splits, heads of a program, warps, stages.
_FASTEST = (
    (24, ((6, 32, 16, 8, 1), (32, 16, 16, 4, 2), (96, 4, 16, 4, 2), (192, 2, 16, 4, 2), (_ANY, 1, 16, 4, 2))),
    (
        48,
        (
            (2, 32, 16, 8, 1),
            (8, 16, 16, 4, 2),
            (32, 8, 16, 4, 2),
            (96, 4, 32, 4, 2),
            (192, 2, 32, 4, 2),
            (_ANY, 1, 32, 4, 2),
        ),
    ),
    (96, ((2, 32, 16, 8, 2), (8, 16, 16, 4, 2), (32, 8, 32, 4, 2), (96, 2, 32, 4, 3), (_ANY, 1, 64, 8, 3))),
    (_ANY, ((2, 16, 16, 8, 2), (8, 8, 32, 4, 2), (32, 4, 32, 4, 2), (_ANY, 1, 32, 4, 2))),
)


@dataclasses.dataclass(frozen=True)
class _Plain:
    """Rows of numbers, `[latent | rotated key]`. `columns`: the pieces of a query that meet what `load` returns."""

    value: int
    rope: int

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        return (0, self.value), (self.value, self.rope)

    def load(self, pool, rows):
        """Pieces of the keys, `[rows, columns]` each, and what each row of them is to be multiplied with."""
        return [(pool[rows, pl.ds(first, width)], None) for first, width in self.columns]


@dataclasses.dataclass(frozen=True)
class _Packed:
    """Records of `records.pack_rows`: a word's bytes belong to the four quarters of the latent."""

    value: int
    rope: int
    interpret: bool

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        quarter, half = self.value // 4, self.rope // 2
        return (*((i * quarter, quarter) for i in range(4)), (self.value, half), (self.value + half, half))

    def load(self, pool, rows):
        quarter, half, groups = self.value // 4, self.rope // 2, scale_groups(self.value)
        words = pool[rows, pl.ds(0, quarter)]
        pieces = []
        for i in range(4):
            key = _byte(words, i) if self.interpret else _byte_in_ptx(words, i)
            scale = pool[rows, quarter + i * quarter * groups // self.value]
            pieces.append((key, jax.lax.bitcast_convert_type(scale, jnp.float32)))
        words = pool[rows, pl.ds(quarter + groups, half)]
        for i in range(2):
            bits = (words >> (16 * i)).astype(jnp.uint16)
            pieces.append((jax.lax.bitcast_convert_type(bits, jnp.bfloat16), None))
        return pieces


def _byte(words, i):
    """Byte i of words as float8_e4m3fn, in bfloat16."""
    byte = ((words >> (8 * i)) & 0xFF).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.bfloat16)


def _byte_in_ptx(words, i):
    """`_byte` for two words at a time: sign, exponent and fraction in their places in bfloat16 are 2⁻¹²⁰ times the value.

    Conversions would take several times as long as the products they feed. NaN is read as 480.
    """
    select = (4 + i) << 12 | (4 + i) << 8 | i << 4 | i  # byte i of the first word, twice, and of the second
    asm = f"""
    {{
        .reg .b32 both, low, big;
        prmt.b32 both, $1, $2, {select:#06x};
        shr.b32 low, both, 4;
        and.b32 low, low, 0x07f007f0;
        and.b32 both, both, 0x80008000;
        or.b32 both, both, low;
        mov.b32 big, 0x7b807b80;
        mul.rn.bf16x2 $0, both, big;
    }}
    """
    (key,) = plt.elementwise_inline_asm(
        asm, args=[words], constraints="=r,r,r", pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)],
    )  # fmt: skip
    return key


def sparse_mla_triton(
    q: jax.Array, pool: jax.Array, layer: jax.Array | int, rows: jax.Array, count: jax.Array, *,
    value_width: int, scale: float, out_dtype: Any, config: SparseMLAConfig,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The kernel behind `sparse_mla`, with its arguments: `out [T, H, value_width]` out_dtype and LSE `[T, H]` float32.

    Raises `NotImplementedError` for shapes that it has not.
    """
    tokens, heads, _ = q.shape
    record = _record(q, pool, value_width, config.interpret)
    num_rows = pool.shape[1]
    width = pl.cdiv(rows.shape[1], config.rows) * config.rows
    if width != rows.shape[1]:
        rows = jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    fixed = config.split_rows is not None
    splits = pl.cdiv(width, config.split_rows) if fixed else min(config.splits, width // config.rows)
    # Parts that are rounded are half the bytes to merge, which shows in time from a few on and hardly in the error. Those at
    # fixed places are not: how many there are depends on the longest request.
    part_dtype = jnp.dtype(out_dtype) if fixed or splits == 1 else q.dtype if splits <= 16 else jnp.dtype(jnp.float32)

    def kernel(layer_ref, count_ref, q_ref, pool_ref, rows_ref, out_ref, lse_ref):
        head = pl.program_id(2) * config.heads + jnp.arange(config.heads, dtype=jnp.int32)
        if heads % config.heads:
            head = jnp.minimum(head, heads - 1)  # past the end: the last head once more, with the same bits
        query = [q_ref[head, pl.ds(first, width)] for first, width in record.columns]
        number = count_ref[...]
        start = layer_ref[0] * num_rows
        spare = rows_ref[0]  # what masked places read: a row of the list, since any other may hold NaN
        first, last = _bounds(number, pl.program_id(1), splits, config)

        def step(tile, carry):
            values, top, mass = carry
            place = tile * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
            valid = place < number
            row = jnp.where(valid, rows_ref[pl.ds(tile * config.rows, config.rows)], spare)
            keys = record.load(pool_ref, start + row)
            score = sum(_scaled(_dot(part, key, trans_b=True), by) for part, (key, by) in zip(query, keys, strict=True))
            score = jnp.where(valid[None, :], score * (scale * _LOG2_E), _LOWEST)
            new_top = jnp.maximum(top, jnp.max(score, axis=1))
            keep = jnp.exp2(top - new_top)
            weight = jnp.where(valid[None, :], jnp.exp2(score - new_top[:, None]), 0.0)
            values = tuple(
                value * keep[:, None] + _dot(_scaled(weight, by).astype(key.dtype), key)
                for value, (key, by) in zip(values, keys, strict=False)
            )
            return values, new_top, mass * keep + jnp.sum(weight, axis=1)

        value_columns = [(at, size) for at, size in record.columns if at < value_width]
        values, top, mass = jax.lax.fori_loop(
            first, last, step,
            (
                tuple(jnp.zeros((config.heads, size), jnp.float32) for _, size in value_columns),
                jnp.full((config.heads,), _LOWEST, jnp.float32),
                jnp.zeros((config.heads,), jnp.float32),
            ),
        )  # fmt: skip
        safe = jnp.where(mass > 0, mass, 1.0)
        lse_ref[head] = jnp.where(mass > 0, (top + jnp.log2(safe)) / _LOG2_E, -jnp.inf)

        def write():
            for value, (at, size) in zip(values, value_columns, strict=True):
                out_ref[head, pl.ds(at, size)] = (value / safe[:, None]).astype(part_dtype)

        if splits == 1:
            write()
        else:  # the merge drops parts without rows, whatever they hold
            pl.when(first < last)(write)

    def whole(*shape):
        return pl.BlockSpec(shape, lambda t, s, h: (0,) * len(shape))

    out, lse = pl.pallas_call(
        kernel,
        grid=(tokens, splits, pl.cdiv(heads, config.heads)),
        in_specs=[
            whole(1),
            pl.BlockSpec((None,), lambda t, s, h: (t,)),
            pl.BlockSpec((None, heads, q.shape[2]), lambda t, s, h: (t, 0, 0)),
            whole(pool.shape[0] * num_rows, pool.shape[2]),
            pl.BlockSpec((None, width), lambda t, s, h: (t, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, heads, value_width), lambda t, s, h: (t, s, 0, 0)),
            pl.BlockSpec((None, None, heads), lambda t, s, h: (t, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, splits, heads, value_width), part_dtype),
            jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=config.interpret,
        name="sparse_mla",
    )(jnp.asarray(layer, jnp.int32).reshape(1), count, q, pool.reshape(-1, pool.shape[2]), rows)
    if splits == 1:
        return out[:, 0], lse[:, 0]
    merge = MergeConfig.choose(tokens * heads, value_width, config.interpret)
    return merge_splits(out, lse, out_dtype=out_dtype, config=merge)


def has_widths(value_width: int, rope: int, packed: bool = False) -> bool:
    """Whether the kernel has rows of this latent and rotated key: powers of two, as blocks in Triton are, from 16 on.

    Of packed ones it takes quarters and halves, each with one scale.
    """
    powers = all(width >= 16 and width & (width - 1) == 0 for width in (value_width, rope))
    return powers and (not packed or (64 <= value_width <= 4 * GROUP and rope >= 32))


def _record(q: jax.Array, pool: jax.Array, value_width: int, interpret: bool) -> _Plain | _Packed:
    """How the pool's rows are read. Raises `NotImplementedError`."""
    rope = q.shape[2] - value_width
    if not has_widths(value_width, rope):
        raise NotImplementedError(
            f"sparse MLA in Triton takes latents and rotated keys whose widths are powers of two from 16 on, "
            f"got {value_width} and {rope}: use backend 'xla'"
        )
    if pool.dtype == jnp.uint32 and q.dtype == jnp.bfloat16 and pool.shape[2] == packed_words(value_width, rope):
        if not has_widths(value_width, rope, packed=True):
            raise NotImplementedError(
                f"sparse MLA in Triton takes packed records of 64 to {4 * GROUP} latent values and a rotated key of 32 "
                f"or more, got {value_width} and {rope}: use backend 'xla'"
            )
        return _Packed(value_width, rope, interpret)
    if pool.dtype != q.dtype or q.dtype not in (jnp.bfloat16, jnp.float32) or pool.shape[2] != q.shape[2]:
        raise NotImplementedError(
            f"sparse MLA in Triton takes bfloat16 or float32 queries with rows like them, or bfloat16 ones with packed "
            f"records; got {q.dtype} {q.shape} and {pool.dtype} {pool.shape}: use backend 'xla'"
        )
    return _Plain(value_width, rope)


def _bounds(number, split, splits, config):
    """First and last tile of a split of a list of `number` rows."""
    tiles = jax.lax.div(number + (config.rows - 1), jnp.int32(config.rows))
    if config.split_rows is None:
        share = jax.lax.div(tiles + (splits - 1), jnp.int32(splits))
    else:
        share = jnp.int32(config.split_rows // config.rows)
    first = jnp.minimum(split * share, tiles)
    return first, jnp.minimum(first + share, tiles)


def _scaled(x, by):
    """Columns of `x [heads, rows]` times `by [rows]`."""
    return x if by is None else x * by[None, :]


def _dot(a, b, trans_b=False):
    """Product accumulated in float32; float32 operands keep all their digits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, precision=precision)
