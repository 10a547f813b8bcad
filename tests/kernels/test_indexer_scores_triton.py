"""The kernel of the indexer's scores, against float64: every storage, page size and grouping of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.indexer_scores import indexer_scores
from dcpjax.pallas_kernels.indexer_scores_triton import IndexerConfig
from dcpjax.pallas_kernels.records import pack_rows, unpack_rows
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

TABLE_PAGES, REQUESTS, FIRST = 5, 3, 2
# Tokens' rows: all alike, uneven runs, and in any order.
ROWS = {
    "uniform": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    "uneven": [0, 0, 0, 0, 0, 1, 2, 2, 2, 2],
    "any order": [2, 0, 1, 1, 0, 2, 2],
}
CASES = [
    # storage, rows of a page, heads, dim, queries, rows of the tokens, columns a tile
    ("bfloat16", 64, 5, 16, None, "uniform", 64),
    ("bfloat16", 16, 32, 32, 4, "uneven", 32),
    ("bfloat16", 6, 4, 16, 6, "uneven", 16),
    ("float32", 32, 16, 16, 3, "any order", 16),
    ("float32", 1, 3, 32, 1, "uniform", 16),
    ("fp8", 16, 4, 64, 4, "uniform", 16),
    ("fp8", 4, 5, 64, 2, "any order", 32),
]


def make(storage, group, heads, dim, rows):
    """Arguments; pages that no request has, and everything past the longest end, hold NaN."""
    rng = fresh("indexer", storage, group, heads, dim, rows)
    row_of = np.array(ROWS[rows], np.int32)
    tokens = len(row_of)
    table = 1 + rng.permutation(2 * TABLE_PAGES * REQUESTS)[: TABLE_PAGES * REQUESTS].astype(np.int32)
    table = table.reshape(REQUESTS, TABLE_PAGES)
    end = rng.integers(0, TABLE_PAGES * group + 1, tokens).astype(np.int32)
    end[:3] = [0, TABLE_PAGES * group, FIRST]
    pool = np.full((2, 2 * TABLE_PAGES * REQUESTS + 1, group, dim), np.nan, np.float32)
    for row in range(REQUESTS):
        longest = max(end[row_of == row])
        for page in range(TABLE_PAGES):
            used = np.clip(longest - page * group, 0, group)
            pool[1, table[row, page], :used] = rng.normal(size=(used, dim))
    q, weight = rng.normal(size=(tokens, heads, dim)), rng.normal(size=(tokens, heads))
    dtype = jnp.float32 if storage == "float32" else jnp.bfloat16
    pool = pack_rows(jnp.asarray(pool), dim) if storage == "fp8" else jnp.asarray(pool, dtype)
    return jnp.asarray(q, dtype), jnp.asarray(weight, jnp.float32), pool, jnp.asarray(table), row_of, end


def oracle(q, weight, pool, table, row_of, end):
    if pool.dtype == jnp.uint32:
        pool = unpack_rows(pool, q.shape[-1])
    q, weight, pool = (np.asarray(x, np.float64) for x in (q, weight, pool))
    keys = pool[1, np.asarray(table)[row_of]].reshape(len(q), -1, q.shape[-1])
    score = np.einsum("thk,th->tk", np.maximum(np.einsum("thd,tkd->thk", q, keys), 0), weight)
    column = np.arange(score.shape[1])
    return np.where((column >= FIRST) & (column < end[:, None]), score, -np.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage, group, heads, dim, queries, rows, block", CASES)
def test_equals_float64(storage, group, heads, dim, queries, rows, block, backend):
    q, weight, pool, table, row_of, end = args = make(storage, group, heads, dim, rows)
    call = jax.jit(indexer_scores, static_argnames=("queries", "config", "backend"))
    options = {"queries": queries, "config": IndexerConfig(block, 2), "backend": backend}
    got = call(q, weight, pool, 1, table, row_of, visible=(FIRST, end), **options)
    want = oracle(*args)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    assert np.isfinite(want).sum() >= 10
    np.testing.assert_allclose(got, want, atol=2e-5 * dim, rtol=2e-5)
    same_bits(got, call(q, weight, pool, 1, table, row_of, visible=(FIRST, end), **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_grouping_changes_no_bit(backend):
    """Which tokens share a read is a matter of speed."""
    q, weight, pool, table, row_of, end = make("bfloat16", 16, 16, 16, "uneven")
    alone, *others = (
        indexer_scores(q, weight, pool, 1, table, jnp.asarray(row_of), visible=(FIRST, jnp.asarray(end)),
                       queries=n, config=IndexerConfig(16, 3), backend=backend)
        for n in (1, 2, 3)
    )  # fmt: skip
    for other in others:
        np.testing.assert_allclose(other, alone, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_masked_without_a_range(backend):
    q, weight, pool, table, row_of, _ = make("float32", 32, 16, 16, "uniform")
    got = indexer_scores(q, weight, pool, 1, table, jnp.asarray(row_of), config=IndexerConfig(16, 2), backend=backend)
    want = indexer_scores(q, weight, pool, 1, table, jnp.asarray(row_of))
    # A key of NaN is the caller's to mask, and its score may be anything.
    known = np.isfinite(want)
    np.testing.assert_allclose(np.asarray(got)[known], np.asarray(want)[known], atol=1e-4)
    assert known.any() and not known.all() and not np.isneginf(got).any()


def test_reference_has_the_range_and_the_records():
    for storage in ("float32", "fp8"):
        q, weight, pool, table, row_of, end = args = make(storage, 4, 3, 16, "uneven")
        got = indexer_scores(q, weight, pool, 1, table, row_of, visible=(FIRST, jnp.asarray(end)))
        np.testing.assert_allclose(got, oracle(*args), atol=2e-4)


@pytest.mark.parametrize("storage", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("tokens, rows, group", [(1, 1, 64), (64, 16, 64), (96, 16, 16), (512, 1, 32)])
def test_lowers_for_h200(tokens, rows, group, storage):
    dtype = jnp.float32 if storage == "float32" else jnp.bfloat16
    shape = (3, 50, group, 33 if storage == "fp8" else 128)
    pool = jax.ShapeDtypeStruct(shape, jnp.uint32 if storage == "fp8" else dtype)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows, 40), (tokens,), (tokens,))]
    q = jax.ShapeDtypeStruct((tokens, 32, 128), dtype)
    weight = jax.ShapeDtypeStruct((tokens, 32), jnp.float32)

    def call(q, weight, pool, table, row_of, end):
        return indexer_scores(q, weight, pool, 2, table, row_of, visible=(0, end), backend="triton")

    assert "indexer_scores" in lower_for_h200(call, q, weight, pool, *ints)


def test_other_widths_are_refused():
    q, weight, pool, table, row_of, _ = make("float32", 4, 3, 24, "uniform")
    with pytest.raises(NotImplementedError, match="24 values"):
        indexer_scores(q, weight, pool, 1, table, row_of, backend="triton")
    q, weight, pool, table, row_of, _ = make("fp8", 4, 3, 32, "uniform")
    with pytest.raises(NotImplementedError, match="32 values.* packed ones of 64 and 128"):
        indexer_scores(q, weight, pool, 1, table, row_of, backend="triton")
