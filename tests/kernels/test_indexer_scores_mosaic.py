"""The Mosaic kernel of the indexer's scores: the order that it takes values in, lowered here, run on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.indexer_scores import indexer_scores
from dcpjax.pallas_kernels.indexer_scores_mosaic import halved, scores_mosaic
from dcpjax.pallas_kernels.mosaic_config import DIM, MosaicScoresConfig, has_keys
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


def test_queries_meet_packed_keys_in_their_order():
    rng = fresh("order")
    keys = pack_rows(jnp.asarray(rng.normal(size=(5, DIM)), jnp.float32), DIM)
    q, weight = jnp.asarray(rng.normal(size=(3, 2, DIM)), jnp.bfloat16), jnp.ones((3, 2))
    half, weight = halved(q, weight)
    assert half.dtype == jnp.float16
    got = np.einsum("thd,kd->thk", np.asarray(half, np.float64), np.stack([operand(k) for k in np.asarray(keys)]))
    want = np.einsum("thd,kd->thk", np.asarray(q, np.float64), np.asarray(unpack_rows(keys, DIM), np.float64))
    np.testing.assert_allclose(got * np.asarray(weight)[..., None], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e30, 3e-30, 0.0])
def test_queries_of_any_size_stay_in_range(size):
    q = jnp.asarray(fresh("range").normal(size=(2, 3, DIM)) * size, jnp.bfloat16)
    half, weight = halved(q, jnp.full((2, 3), 0.5))
    assert np.abs(np.asarray(half, np.float32)).max() <= 1
    got, want = half.astype(jnp.float32) * weight[..., None], q.astype(jnp.float32) / 2
    np.testing.assert_array_equal(jnp.sort(got, axis=2), jnp.sort(want, axis=2))


CASES = [  # requests, pages of a request, keys of a page, tokens, tokens a group, packed, heads
    (3, 8, 64, 9, 3, True, 32),
    (3, 20, 32, 7, 2, True, 5),
    (2, 9, 128, 10, 5, True, 64),
    (3, 7, 64, 9, 3, False, 32),
    (2, 21, 16, 5, 2, False, 32),
    (1, 3, 128, 1, 1, False, 32),
    (4, 5, 64, 4, 1, True, 32),
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


def test_what_it_does_not_serve():
    assert has_keys(DIM, 32, 64, jnp.uint32) and has_keys(DIM, 32, 8, jnp.bfloat16)
    q, weight, pool, table, row_of, _ = make(2, 4, 16, 3, 1, True, 32)
    with pytest.raises(NotImplementedError, match="pages of 16 keys uint32"):
        scores_mosaic(q, weight, pool, 1, table, row_of, None, 1)
    assert not has_keys(64, 32, 64, jnp.bfloat16) and not has_keys(DIM, 32, 64, jnp.float32)
    assert MosaicScoresConfig.choose(1, 4096, True).tiles < MosaicScoresConfig().tiles
