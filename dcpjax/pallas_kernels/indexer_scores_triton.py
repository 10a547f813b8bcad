"""Scores of the DSA indexer over paged keys: Triton kernel.

One program takes the keys of a few tiles of columns and all queries of one group, so that the drafts of a request share
one read of its keys. What bounds it is that read.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.pallas_kernels.records import GROUP


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """block: columns a tile, a power of two from 16. tiles: tiles a program. warps, stages: of the compiler."""

    block: int = 64
    tiles: int = 8
    warps: int = 4
    stages: int = 4

    @classmethod
    def choose(cls, queries: int, rows: int, columns: int, fp8: bool) -> "IndexerConfig":
        """For groups of `queries` tokens of `rows` requests over `columns` keys."""
        # Enough programs for every multiprocessor several times over, and few enough that each has work.
        tiles = 8
        while tiles > 1 and rows * columns < 64 * tiles * 132 * 3:
            tiles //= 2
        alone = queries == 1 and tiles == 8 and not fp8
        return cls(tiles=tiles, warps=2 if alone else 4, stages=3 if fp8 else 4)


def scores_triton(
    q: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    row_of: jax.Array,
    visible: tuple[jax.Array | int, jax.Array] | None,
    queries: int,
    config: IndexerConfig | None,
    interpret: bool = False,
) -> jax.Array:
    """`indexer_scores` on the Triton backend, with its shapes and dtypes: `[T, P·G]` float32.

    Raises `NotImplementedError` for keys that `has_width` has not.
    """
    tokens, heads, dim = q.shape
    fp8 = pool.dtype == jnp.uint32
    if not has_width(dim, fp8):
        raise NotImplementedError(
            f"index keys of {dim} values: the kernel takes powers of two from 16, packed ones of 64 and 128; use backend xla"
        )
    columns = pages.shape[1] * pool.shape[2]
    if config is None:
        config = IndexerConfig.choose(queries, -(-tokens // queries), columns, fp8)
    # A tile of several tokens needs as many places to store to.
    queries = min(queries, tokens) if columns >= config.block else 1
    # The tensor cores want at least 16 columns; a surplus head weighs nothing.
    surplus = max(16, pl.next_power_of_2(heads)) - heads
    if surplus:
        q, weight = (jnp.pad(x, ((0, 0), (0, surplus), *((0, 0),) * (x.ndim - 2))) for x in (q, weight))
    first, end = (0, jnp.full(tokens, columns, jnp.int32)) if visible is None else visible
    scalars = jnp.stack([jnp.asarray(layer, jnp.int32) * pool.shape[1], jnp.asarray(first, jnp.int32)])
    flat = pool.reshape(-1, pool.shape[3])

    def kernel(*refs):
        _kernel(*refs, group=pool.shape[2], queries=queries, config=config, fp8=fp8, interpret=interpret)

    def whole(x):
        return pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)

    args = (q, weight, flat, pages, row_of, end, scalars)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(columns, config.block * config.tiles), pl.cdiv(tokens, queries)),
        in_specs=[whole(x) for x in args],
        out_specs=pl.BlockSpec((tokens, columns), lambda i, j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="indexer_scores",
    )(*args)


def has_width(dim: int, packed: bool = False) -> bool:
    """Whether the kernel serves keys of `dim` values. Of a packed one it takes quarters, and one scale."""
    return dim >= 16 and not dim & (dim - 1) and (not packed or 64 <= dim <= GROUP)


def _pieces(queries: int) -> list[range]:
    """Queries that one product serves: four, two or one, as its columns are a power of two."""
    pieces, first = [], 0
    while first < queries:
        size = next(n for n in (4, 2, 1) if n <= queries - first)
        pieces.append(range(first, first + size))
        first += size
    return pieces


def _kernel(
    q_ref, w_ref, k_ref, pages_ref, row_ref, end_ref, scalar_ref, out_ref, *, group, queries, config, fp8, interpret
):
    """Program (i, j): columns of chunk i, tokens `j·queries …`."""
    tokens, columns = out_ref.shape
    dim, block = q_ref.shape[2], config.block
    # Values of a key that one product takes: all of them, or the byte of every word.
    depth = dim // 4 if fp8 else dim
    base = pl.program_id(0) * (block * config.tiles)
    start = pl.program_id(1) * queries
    page0, first = scalar_ref[0], scalar_ref[1]
    lane = jnp.arange(block, dtype=jnp.int32)
    # Past the last token the last one stands in; it computes the same and stores nothing.
    at = [jnp.minimum(start + j, tokens - 1) for j in range(queries)]
    real = [start + j < tokens for j in range(queries)]
    rows = [row_ref[t] for t in at]
    ends = [jnp.minimum(end_ref[t], columns) for t in at]
    exact = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    # 8-bit values are exact in float16, and there is an instruction that brings them there.
    operand = jnp.float16 if fp8 and q_ref.dtype == jnp.bfloat16 else q_ref.dtype
    heads = q_ref.shape[1]
    pieces = [(piece, *_piece(q_ref, w_ref, at, start, piece, depth, operand)) for piece in _pieces(queries)]

    def put(j, column, value, mine):
        plt.store(out_ref.at[at[j], pl.ds(column, block)], value, mask=(column + lane < columns) & mine & real[j])

    def put_piece(piece, column, score, row):
        """Scores `[block, n]` of n tokens in one store: to take columns out one by one costs more than the products."""
        token = start + piece[0] + jnp.arange(len(piece), dtype=jnp.int32)
        place = column + lane
        real = (token < tokens)[None, :] & (place < columns)[:, None]
        # What is not stored has a place of its own too: the interpreter writes back what was there.
        token = jnp.where(token < tokens, token, token - tokens)
        place = jnp.where(place < columns, place, place - columns)
        mine = (row_ref[token] == row)[None, :]
        seen = (place >= first)[:, None] & (place[:, None] < end_ref[token][None, :])
        token, place = (jnp.broadcast_to(x, score.shape) for x in (token[None, :], place[:, None]))
        plt.store(out_ref.at[token, place], jnp.where(seen, score, -jnp.inf), mask=real & mine)

    def keys(row, column):
        """A tile of keys `[block, dim]` and its scales `[block]` or None."""
        if group % block == 0:
            page = pages_ref[row, jax.lax.div(column, jnp.int32(group))]
            begin = (page0 + page) * group + jax.lax.rem(column, jnp.int32(group))
            where, places = begin + lane, pl.ds(begin, block)
        else:
            mine = jnp.minimum(column + lane, columns - 1)
            size = jnp.full((block,), group, jnp.int32)
            where = (page0 + pages_ref[row, jax.lax.div(mine, size)]) * group + jax.lax.rem(mine, size)
            places = where
        if not fp8:
            return [k_ref[places, pl.ds(0, dim)].astype(operand)], None
        words = k_ref[places, pl.ds(0, depth)]
        scale = jax.lax.bitcast_convert_type(k_ref[where, depth], jnp.float32)
        if operand == jnp.float16 and not interpret:
            return [_byte_in_ptx(words, i) for i in range(4)], scale
        return [_byte(words, i, operand) for i in range(4)], scale

    def pass_of(turn, _):
        """The queries whose row is first met at token `turn` of the group."""
        row = row_ref[jnp.minimum(start + turn, tokens - 1)]
        mine = [r == row for r in rows]
        count = jnp.int32(config.tiles)
        end = jnp.where(mine[0], ends[0], 0)
        for j in range(1, queries):
            count = jnp.where(mine[j - 1] & (j - 1 < turn), 0, count)
            end = jnp.maximum(end, jnp.where(mine[j], ends[j], 0))
        live = jnp.minimum(count, jax.lax.div(jnp.maximum(end - base, 0) + (block - 1), jnp.int32(block)))

        def tile(i, _):
            column = base + i * block
            parts, scale = keys(row, column)
            for piece, qs, w in pieces:
                dot = plt.dot(parts[0], qs[0], trans_b=True, precision=exact)
                for part, q in zip(parts[1:], qs[1:], strict=True):
                    dot += plt.dot(part, q, trans_b=True, precision=exact)
                score = jnp.maximum(dot, 0.0) * w[None, :]
                if len(piece) > 1:
                    score = jnp.sum(score.reshape(block, len(piece), heads), axis=2)
                    put_piece(piece, column, score if scale is None else score * scale[:, None], row)
                    continue
                score = jnp.sum(score, axis=1)
                score = score if scale is None else score * scale
                seen = (column + lane >= first) & (column + lane < ends[piece[0]])
                put(piece[0], column, jnp.where(seen, score, -jnp.inf), mine[piece[0]])
            return ()

        def blank(i, _):
            for j in range(queries):
                put(j, base + (live + i) * block, jnp.full((block,), -jnp.inf, jnp.float32), mine[j])
            return ()

        jax.lax.fori_loop(0, live, tile, ())
        jax.lax.fori_loop(0, count - live, blank, ())
        return ()

    if queries == 1:
        pass_of(0, ())
    else:
        jax.lax.fori_loop(0, queries, pass_of, ())


def _piece(q_ref, w_ref, at, start, piece, depth, operand):
    """Queries of a few tokens as operands, `depth` values each, and their weights."""
    tokens, heads, dim = q_ref.shape
    if len(piece) == 1:
        token, head, weight = at[piece[0]], slice(None), w_ref[at[piece[0]], :]
    else:
        wide = jnp.arange(len(piece) * heads, dtype=jnp.int32)
        size = jnp.full_like(wide, heads)
        token = jnp.minimum(start + piece[0] + jax.lax.div(wide, size), tokens - 1)
        head = jax.lax.rem(wide, size)
        weight = w_ref[token, head]
    return [q_ref[token, head, pl.ds(i * depth, depth)].astype(operand) for i in range(dim // depth)], weight


def _byte(words, i, operand):
    """Byte i of each word as the float8 that it is."""
    byte = ((words >> (8 * i)) & 0xFF).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(operand)


def _byte_in_ptx(words, i):
    """`_byte` in float16 for two words at a time, which the compiler does not find."""
    select = (4 + i) << 4 | i  # byte i of the first word and of the second
    asm = f"""
    {{
        .reg .b32 both;
        .reg .b16 low, high;
        prmt.b32 both, $1, $2, {select:#06x};
        mov.b32 {{low, high}}, both;
        cvt.rn.f16x2.e4m3x2 $0, low;
    }}
    """
    (value,) = plt.elementwise_inline_asm(
        asm,
        args=[words],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return value
