"""Sparse MLA over rows, the reference that runs everywhere: against float64, with NaN in all that must not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels import sparse_mla as module
from dcpjax.pallas_kernels.sparse_mla import sparse_mla

TOKENS, HEADS, WIDTH, VALUE, ROWS, TOPK, SCALE = 12, 3, 10, 6, 40, 5, 0.4


def inputs(seed=0, dtype=np.float32):
    """Rows that no token lists hold NaN, as do entries past the counts, which point at them or outside the pool."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, TOPK + 1, TOKENS).astype(np.int32)
    count[:3] = [0, 1, TOPK]
    good, bad = np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)
    pool = np.full((2, ROWS, WIDTH), np.nan, np.float32)
    pool[1, good] = rng.normal(size=(len(good), WIDTH))
    rows = np.stack([rng.permutation(good)[:TOPK] for _ in range(TOKENS)]).astype(np.int32)
    junk = rng.choice([*bad, ROWS, 2**30, -1], rows.shape)
    rows = np.where(np.arange(TOPK) < count[:, None], rows, junk).astype(np.int32)
    q = rng.normal(size=(TOKENS, HEADS, WIDTH)).astype(np.float32)
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), rows, count


def oracle(q, pool, rows, count):
    out, lse = np.zeros((TOKENS, HEADS, VALUE)), np.full((TOKENS, HEADS), -np.inf)
    q, pool = np.asarray(q, np.float64), np.asarray(pool, np.float64)
    for t in range(TOKENS):
        if count[t]:
            keys = pool[1, rows[t, : count[t]]]
            weight = np.exp(q[t] @ keys.T * SCALE)
            out[t] = weight / weight.sum(1, keepdims=True) @ keys[:, :VALUE]
            lse[t] = np.log(weight.sum(1))
    return out, lse


run = jax.jit(sparse_mla, static_argnames=("value_width", "scale"))


@pytest.mark.parametrize("dtype, close", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_equals_float64(dtype, close):
    args = inputs(dtype=dtype)
    out, lse = run(args[0], args[1], jnp.int32(1), *args[2:], value_width=VALUE, scale=SCALE)
    want = oracle(*args)
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out, want[0], atol=close, rtol=0)
    np.testing.assert_allclose(lse, want[1], atol=close, rtol=0)


def test_no_rows_gives_exact_zeros_and_minus_infinity():
    q, pool, rows, _ = inputs()
    out, lse = run(q, pool, 1, rows, np.zeros(TOKENS, np.int32), value_width=VALUE, scale=SCALE)
    np.testing.assert_array_equal(out, np.zeros((TOKENS, HEADS, VALUE)))
    np.testing.assert_array_equal(lse, np.full((TOKENS, HEADS), -np.inf))


def test_order_of_rows_does_not_matter():
    q, pool, rows, _ = inputs()
    count = np.full(TOKENS, TOPK, np.int32)
    rows = np.arange(0, 2 * TOPK, 2, dtype=np.int32)[None].repeat(TOKENS, 0)
    first, second = (run(q, pool, 1, r, count, value_width=VALUE, scale=SCALE) for r in (rows, rows[:, ::-1].copy()))
    np.testing.assert_allclose(first[0], second[0], atol=1e-6)


def test_large_scores_do_not_overflow():
    pool = jnp.array([[[300.0, 1.0], [-300.0, 2.0]]])
    out, lse = run(jnp.array([[[1.0, 0.0]]]), pool, 0, np.array([[0, 1]]), np.array([2]), value_width=2, scale=1.0)
    np.testing.assert_allclose(out, [[[300.0, 1.0]]])
    np.testing.assert_allclose(lse, [[300.0]])


@pytest.mark.parametrize("tokens_a_tile", [1, 3, 4, 5])
def test_tiles_of_tokens_change_nothing(tokens_a_tile, monkeypatch):
    """Tiles are powers of two that divide T; here 1, 2 and 4 tokens."""
    q, pool, rows, count = inputs()
    want = sparse_mla(q, pool, 1, rows, count, value_width=VALUE, scale=SCALE)
    monkeypatch.setattr(module, "_TILE_BYTES", tokens_a_tile * TOPK * WIDTH * 4)
    assert module._tile(rows.shape, pool) == {1: 1, 3: 2, 4: 4, 5: 4}[tokens_a_tile]
    got = sparse_mla(q, pool, 1, jnp.asarray(rows), jnp.asarray(count), value_width=VALUE, scale=SCALE)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
