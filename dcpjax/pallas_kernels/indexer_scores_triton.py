"""Scores of the DSA indexer over paged keys: Triton kernel.

One program takes the keys of a few tiles of columns and all queries of one group, so that the drafts of a request share
one read of its keys. What bounds it is that read.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MOST_QUERIES = 8


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
        tiles = 16
        while tiles > 1 and rows * columns < 64 * tiles * 132 * 4:
            tiles //= 2
        return cls(tiles=tiles, warps=2 if fp8 else 4)


def scores_triton(
    q: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    row_of: jax.Array,
    visible: tuple[jax.Array | int, jax.Array] | None,
    queries: int | None,
    config: IndexerConfig | None,
    interpret: bool = False,
) -> jax.Array:
    """`indexer_scores` on the Triton backend; see there."""
    tokens, heads, dim = q.shape
    fp8 = pool.dtype == jnp.uint8
    check(dim, pool)
    columns = pages.shape[1] * pool.shape[2]
    if queries is None:
        queries = min(max(tokens // pages.shape[0], 1), MOST_QUERIES)
    if config is None:
        config = IndexerConfig.choose(queries, -(-tokens // queries), columns, fp8)
    # The tensor cores want at least 16 columns; a surplus head weighs nothing.
    surplus = max(16, pl.next_power_of_2(heads)) - heads
    if surplus:
        q, weight = (jnp.pad(x, ((0, 0), (0, surplus), *((0, 0),) * (x.ndim - 2))) for x in (q, weight))
    first, end = (0, jnp.full(tokens, columns, jnp.int32)) if visible is None else visible
    scalars = jnp.stack([jnp.asarray(layer, jnp.int32) * pool.shape[1], jnp.asarray(first, jnp.int32)])
    flat = pool.reshape(-1, pool.shape[3])

    def kernel(*refs):
        _kernel(*refs, group=pool.shape[2], queries=queries, config=config, fp8=fp8)

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


def check(dim: int, pool: jax.Array) -> None:
    """Raises `NotImplementedError` where the kernel does not serve keys of `dim` values in this pool."""
    if dim < 16 or dim & (dim - 1):
        raise NotImplementedError(
            f"index keys of {dim} values: the kernel takes powers of two from 16; use backend xla"
        )
    nbytes = pool.size * pool.dtype.itemsize
    if pool.dtype == jnp.uint8 and 2**31 <= nbytes <= 2**32:
        # The backend computes offsets of elements in 32 signed bits unless the array has more than 4 GiB.
        raise NotImplementedError(
            f"a pool of {nbytes} bytes, between 2 and 4 GiB, cannot be addressed; change its pages"
        )


def _kernel(q_ref, w_ref, k_ref, pages_ref, row_ref, end_ref, scalar_ref, out_ref, *, group, queries, config, fp8):
    """Program (i, j): columns of chunk i, tokens `j·queries …`."""
    tokens, columns = out_ref.shape
    dim, block = q_ref.shape[2], config.block
    base = pl.program_id(0) * (block * config.tiles)
    start = pl.program_id(1) * queries
    page0, first = scalar_ref[0], scalar_ref[1]
    lane = jnp.arange(block, dtype=jnp.int32)
    # Past the last token the last one stands in; it computes the same and stores nothing.
    at = [jnp.minimum(start + j, tokens - 1) for j in range(queries)]
    real = [start + j < tokens for j in range(queries)]
    rows = [row_ref[t] for t in at]
    ends = [jnp.minimum(end_ref[t], columns) for t in at]
    qs = [q_ref[t, :, :] for t in at]
    ws = [w_ref[t, :] for t in at]
    exact = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def put(j, column, value, mine):
        plt.store(out_ref.at[at[j], pl.ds(column, block)], value, mask=(column + lane < columns) & mine & real[j])

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
        key = k_ref[places, pl.ds(0, dim)]
        if not fp8:
            return key.astype(q_ref.dtype), None
        bits = jnp.zeros(block, jnp.int32)
        for byte in range(4):
            bits |= k_ref[where, dim + byte].astype(jnp.int32) << (8 * byte)
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return jax.lax.bitcast_convert_type(key, jnp.float8_e4m3fn).astype(q_ref.dtype), scale

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
            key, scale = keys(row, column)
            place = column + lane
            for j in range(queries):
                dot = plt.dot(key, qs[j], trans_b=True, precision=exact)
                score = jnp.sum(jnp.maximum(dot, 0.0) * ws[j][None, :], axis=1)
                if scale is not None:
                    score = score * scale
                put(j, column, jnp.where((place >= first) & (place < ends[j]), score, -jnp.inf), mine[j])
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
