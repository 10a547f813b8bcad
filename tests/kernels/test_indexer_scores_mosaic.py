"""The Mosaic kernel of the indexer's scores: the order that it takes values in, lowered here, run on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.indexer_scores import indexer_scores
from dcpjax.pallas_kernels.indexer_scores_mosaic import scores_mosaic
from dcpjax.pallas_kernels.mosaic_config import DIM, MosaicScoresConfig, has_keys
from dcpjax.pallas_kernels.mosaic_queries import FIRST, place_of
from dcpjax.pallas_kernels.records import pack_rows, unpack_rows
from tests.kernels.base import fresh, lower_for_h200, same_bits


def operand(record):
    """The twin of how the kernel takes a packed key apart `[33]` uint32: values in the order of the tensor cores' columns."""
    values = np.empty(DIM, np.float32)
    for thread in range(4):
        for i in range(8):
            word = np.asarray(record)[8 * thread + i : 8 * thread + i + 1]
            of_word = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(word), jnp.float8_e4m3fn), np.float32)[0]
            for half in range(2):
                # A thread has two neighbouring columns of every eight.
                column = 8 * (2 * i + half) + 2 * thread
                values[column : column + 2] = of_word[2 * half : 2 * half + 2]
    return values * np.asarray(record)[DIM // 4 :].view(np.float32)


def queries(q):
    """The twin of how the kernel lays a query `[128]` out: of each of the values that a thread reads, where it stores it."""
    values = np.full(DIM, np.nan, np.float32)
    for thread in range(4):
        for word in range(8):
            for half in range(2):
                column = place_of(word, half) + 2 * thread
                values[column : column + 2] = [q[FIRST[2 * half + byte] + 8 * thread + word] for byte in range(2)]
    return values


def test_queries_meet_packed_keys_in_their_order():
    rng = fresh("order")
    keys = pack_rows(jnp.asarray(rng.normal(size=(5, DIM)), jnp.float32), DIM)
    q = rng.normal(size=(3, DIM)).astype(np.float32)
    got = np.stack([queries(x) for x in q]) @ np.stack([operand(k) for k in np.asarray(keys)]).T
    np.testing.assert_allclose(got, q @ np.asarray(unpack_rows(keys, DIM)).T, rtol=1e-5, atol=1e-5)


CASES = [  # requests, pages of a request, keys of a page, tokens, tokens a group, packed, heads
    (3, 8, 64, 9, 3, True, 32),
    (3, 20, 32, 7, 2, True, 5),
    (2, 9, 128, 10, 5, True, 64),
    (3, 7, 64, 9, 3, False, 32),
    (2, 21, 16, 5, 2, False, 32),
    (1, 3, 128, 1, 1, False, 32),
    (4, 5, 64, 4, 1, True, 32),
    # A single query, copied: surplus heads, two blocks of them, several copies a tile.
    (2, 21, 32, 5, 1, True, 12),
    (2, 21, 16, 5, 1, False, 64),
]


def make(requests, places, page, tokens, queries, packed, heads):
    rng = fresh("mosaic", requests, places, page, tokens)
    num_pages = 2 * requests * places
    keys = rng.normal(size=(2, num_pages, page, DIM))
    table = rng.permutation(num_pages)[: requests * places].astype(np.int32).reshape(requests, places)
    unused = np.setdiff1d(np.arange(num_pages), table)
    keys[:, unused] = np.nan
    pool = pack_rows(jnp.asarray(keys, jnp.float32), DIM) if packed else jnp.asarray(keys, jnp.bfloat16)
    end = rng.integers(0, places * page + 1, tokens).astype(np.int32)
    end[0] = places * page
    q, weight = rng.normal(size=(tokens, heads, DIM)), rng.normal(size=(tokens, heads))
    row_of = rng.integers(0, requests, tokens).astype(np.int32)
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(weight, jnp.float32), pool, table, row_of, end


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_h200(case):
    def call(q, weight, pool, table, row_of, end):
        return scores_mosaic(q, weight, pool, 1, table, row_of, (2, end), case[4])

    assert "mosaic_gpu" in lower_for_h200(call, *jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make(*case))))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_on_the_device(case):
    q, weight, pool, table, row_of, end = make(*case)
    call = jax.jit(
        lambda *args: scores_mosaic(*args[:3], 1, *args[3:5], (2, args[5]), case[4], MosaicScoresConfig(3, 2))
    )
    got = call(q, weight, pool, table, row_of, end)
    want = indexer_scores(q, weight, pool, 1, jnp.asarray(table), jnp.asarray(row_of), visible=(2, jnp.asarray(end)))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    assert np.isfinite(want).sum() > 50
    np.testing.assert_allclose(got, want, atol=2e-3, rtol=2e-5)
    same_bits(got, call(q, weight, pool, table, row_of, end))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e36, 3e-30, 0.0])
def test_queries_of_any_size_stay_in_range(size):
    q, weight, pool, table, row_of, _ = make(*CASES[0])
    # Each head has its own size.
    q = (q.astype(jnp.float32) * jnp.where(jnp.arange(q.shape[1]) % 2, size, 1.0)[:, None]).astype(jnp.bfloat16)
    weight = jnp.where(jnp.arange(q.shape[1]) % 2, weight / (size or 1), 0)
    args = weight, pool, 1, jnp.asarray(table), jnp.asarray(row_of)
    got = jax.jit(lambda q: scores_mosaic(q, *args, None, 3))(q)
    want = indexer_scores(q, *args)
    assert size == 0 or np.nanmax(np.abs(want)) > 1
    np.testing.assert_allclose(got, want, atol=2e-3, rtol=2e-5)


def test_what_it_does_not_serve():
    assert has_keys(DIM, 32, 64, jnp.uint32) and has_keys(DIM, 32, 8, jnp.bfloat16)
    q, weight, pool, table, row_of, _ = make(2, 4, 16, 3, 1, True, 32)
    with pytest.raises(NotImplementedError, match="pages of 16 keys uint32"):
        scores_mosaic(q, weight, pool, 1, table, row_of, None, 1)
    assert not has_keys(64, 32, 64, jnp.bfloat16) and not has_keys(DIM, 32, 64, jnp.float32)


def test_programs_fill_the_chip_once_or_are_short():
    def chunks(groups, columns, queries=1, packed=True, heads=32):
        return MosaicScoresConfig.choose(groups, columns, packed, queries, heads).chunks

    # Of 132 multiprocessors, four programs each of one query, three of four.
    assert chunks(16, 2**15) == 33 and chunks(16, 2**17, 4, packed=False) == 24
    # A program that would have more tiles than is good is cut, as are those that would leave much of the chip idle.
    assert chunks(16, 2**17) == 342 and chunks(16, 2**17, 4) == 128 and chunks(64, 2**17, 4) == 64
    assert chunks(300, 2**15) == 86 and chunks(600, 2**15) == 86
    # A tile each, and no more programs than tiles.
    assert chunks(1, 2**15) == 512 and chunks(1, 64) == 1
