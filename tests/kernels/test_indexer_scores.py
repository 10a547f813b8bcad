"""Scores of the indexer over paged keys: against float64, column by column."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels import indexer_scores as module
from dcpjax.pallas_kernels.indexer_scores import indexer_scores

TOKENS, HEADS, DIM, PAGES, GROUP = 8, 3, 5, 6, 4
TABLE = np.array([[2, 5, 0], [3, 1, 4]], np.int32)
ROW_OF = np.array([0, 1, 1, 0, 1, 0, 0, 1], np.int32)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, weight = rng.normal(size=(TOKENS, HEADS, DIM)), rng.normal(size=(TOKENS, HEADS))
    pool = rng.normal(size=(2, PAGES, GROUP, DIM))
    pool[0], pool[1, 0] = np.nan, np.nan  # the other layer and the dummy page
    return jnp.asarray(q, dtype), jnp.asarray(weight, jnp.float32), jnp.asarray(pool, dtype)


def oracle(q, weight, pool):
    q, weight, pool = (np.asarray(x, np.float64) for x in (q, weight, pool))
    keys = pool[1, TABLE[ROW_OF]].reshape(TOKENS, -1, DIM)
    return np.einsum("thk,th->tk", np.maximum(np.einsum("thd,tkd->thk", q, keys), 0), weight)


@pytest.mark.parametrize("dtype, close", [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-5)])
def test_equals_float64(dtype, close):
    """Products of bfloat16 values are exact in float32, so the tolerance is the same. Only the dummy page's columns
    are garbage."""
    q, weight, pool = inputs(dtype)
    score = jax.jit(indexer_scores)(q, weight, pool, jnp.int32(1), TABLE, ROW_OF)
    assert score.dtype == jnp.float32 and score.shape == (TOKENS, 3 * GROUP)
    want = oracle(q, weight, pool)
    np.testing.assert_allclose(score, want, atol=close, rtol=0)
    dummy = (TABLE[ROW_OF] == 0).repeat(GROUP, 1)
    np.testing.assert_array_equal(np.isnan(score), dummy)


@pytest.mark.parametrize("tokens_a_tile, tile", [(1, 1), (3, 2), (7, 4), (8, 8)])
def test_tiles_of_tokens_change_nothing(tokens_a_tile, tile, monkeypatch):
    q, weight, pool = inputs()
    want = indexer_scores(q, weight, pool, 1, TABLE, ROW_OF)
    seen = []
    real = jax.lax.map
    monkeypatch.setattr(module, "_TILE_BYTES", tokens_a_tile * TABLE.shape[1] * GROUP * DIM * 4)
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: seen.append(xs[0].shape[1]) or real(f, xs))
    got = indexer_scores(q, weight, pool, 1, jnp.asarray(TABLE), jnp.asarray(ROW_OF))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert seen == ([] if tile == TOKENS else [tile])
