"""Merging partial outputs by LSE: equal to one softmax, whatever a rank without keys reports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax import attention
from dcpjax.attention import AttentionOptions
from dcpjax.collectives import BACKENDS, check_backend, merge_ranks
from dcpjax.errors import ConfigError
from dcpjax.mesh import make_plan
from dcpjax.pallas_kernels.lse_merge import merge_parts, part_weights, weigh
from dcpjax.pallas_kernels.sparse_mla import sparse_mla
from tests.attention.paged import (
    NEEDS_RANKS,
    NUM_DEVICES,
    ON_GPU,
    PAGE,
    Geometry,
    Queries,
    World,
    check,
    fresh_layer,
    on_device,
    oracle_output,
    run,
    slots_of,
)  # fmt: skip

SCORES = np.array([0.5, 1.0, -0.3, 2.0, 0.1, 0.7], np.float32)
VALUES = np.arange(1, 7, dtype=np.float32)
merge = jax.jit(merge_parts)
RANKS, TOKENS, HEADS, WIDTH = min(4, NUM_DEVICES), 5, 8, 4


def softmax(scores, values):
    """`(output, LSE)` in float64; zeros and −inf without keys."""
    if not len(scores):
        return np.zeros(values.shape[1:]), -np.inf
    weight = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return np.tensordot(weight / weight.sum(), values, 1), float(np.log(weight.sum()) + np.max(scores))


def test_inv_6_worked_example():
    """Six tokens over four ranks: {0, 4}, {1, 5}, {2}, {3}."""
    parts = [softmax(SCORES[rank::4], VALUES[rank::4]) for rank in range(4)]
    np.testing.assert_allclose([lse for _, lse in parts], [1.0130, 1.5544, -0.3, 2.0], atol=5e-5)
    np.testing.assert_allclose([out for out, _ in parts], [2.6052, 3.7022, 3, 4], atol=5e-5)
    out, lse = merge(jnp.array([[out] for out, _ in parts]), jnp.array([lse for _, lse in parts]))
    np.testing.assert_allclose(out, [3.616358], atol=1e-6)
    np.testing.assert_allclose(lse, 2.748283, atol=1e-6)
    np.testing.assert_allclose([out[0], lse], softmax(SCORES, VALUES), atol=1e-6)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=12, max_size=12),
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
    st.integers(0, 12),
)
def test_inv_6_any_split_equals_one_softmax(scores, owner, length):
    """Ranks may be empty, and all of them may be."""
    scores, owner = np.array(scores[:length], np.float32), np.array(owner[:length], int)
    values = np.random.default_rng(length).normal(size=(length, 2)).astype(np.float32)
    parts = [softmax(scores[owner == rank], values[owner == rank]) for rank in range(5)]
    out, lse = merge(
        np.array([o for o, _ in parts], np.float32).reshape(5, 2), np.array([lse for _, lse in parts], np.float32)
    )
    want = softmax(scores, values.reshape(length, 2))
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan, -np.inf])
def test_inv_7_broken_lse_and_nan_output_of_an_empty_part(bad):
    """NaN and +inf count as −inf in the merge itself. A finite LSE cannot be told from a real one here: whoever knows
    the count sets it (see the tests of attend)."""
    out = np.array([[1.0, 2.0], [np.nan, np.nan]], np.float32)
    lse = np.array([0.7, bad], np.float32)
    merged, total = merge(out, lse)
    if bad == 0.0:
        assert np.isnan(merged).all()
    else:
        np.testing.assert_array_equal(merged, out[0])
        np.testing.assert_allclose(total, 0.7, rtol=1e-6)


def test_weight_zero_times_nan_is_nan():
    """Why parts are dropped by select: the product keeps the NaN."""
    weight, _ = part_weights(jnp.array([0.0, -jnp.inf]))
    bad = jnp.array([[1.0], [jnp.nan]])
    assert np.isnan(jnp.sum(bad * weight[:, None], 0)).all()
    np.testing.assert_array_equal(jnp.sum(weigh(bad, weight), 0), [1.0])


def test_inv_8_all_parts_empty():
    for outputs in (np.zeros((3, 2, 4)), np.full((3, 2, 4), np.nan)):
        out, lse = merge(outputs.astype(np.float32), np.full((3, 2), -np.inf, np.float32))
        np.testing.assert_array_equal(out, np.zeros((2, 4)))
        np.testing.assert_array_equal(lse, np.full(2, -np.inf))


@pytest.mark.parametrize("shift", [80.0, -80.0, 1e4, -1e4])
def test_inv_9_shift(shift):
    rng = np.random.default_rng(9)
    out = rng.normal(size=(4, 6)).astype(np.float32)
    # Eighths, so that the shift itself rounds nothing.
    lse = (rng.integers(-40, 40, 4) / 8).astype(np.float32)
    plain, moved = merge(out, lse), merge(out, lse + np.float32(shift))
    np.testing.assert_allclose(moved[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(moved[1] - shift, plain[1], atol=1e-2 if abs(shift) > 100 else 1e-5)


def test_inv_10_natural_log():
    """One key with score 2 gives LSE 2, not 2.885; two keys log(Σ exp)."""
    pool = jnp.array([[[2.0, 1.0], [0.5, 3.0]]])
    q = jnp.array([[[1.0, 0.0]]])
    one = sparse_mla(q, pool, 0, jnp.array([[0, 9]]), jnp.array([1]), value_width=2, scale=1.0)
    two = sparse_mla(q, pool, 0, jnp.array([[0, 1]]), jnp.array([2]), value_width=2, scale=1.0)
    np.testing.assert_allclose(one[1], [[2.0]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(two[1]), [[np.exp(2) + np.exp(0.5)]], rtol=1e-6)
    # The merge reads the same base: weights (0.8808, 0.1192), where base 2 would give (0.8, 0.2).
    merged, _ = merge(jnp.array([[1.0], [5.0]]), jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(merged, [1.4768], atol=1e-4)


@functools.cache
def merge_on_mesh(backend):
    plan = make_plan(RANKS, RANKS)
    ranks = plan.spec("ranks")

    def body(out, lse):
        return merge_ranks(out[0], lse[0], backend, on_device(AttentionOptions()).kernels.merge)

    return jax.jit(plan.per_device(body, (ranks, ranks), plan.spec(None, "heads", None)))


def parts_of(dtype, seed=0):
    rng = np.random.default_rng(seed)
    out = jnp.asarray(rng.normal(size=(RANKS, TOKENS, HEADS, WIDTH)), dtype)
    lse = rng.normal(scale=5, size=(RANKS, TOKENS, HEADS)).astype(np.float32)
    # Extremes whose low bits must travel too, an empty rank, a broken one, and a token that nobody holds.
    lse[:, 1] = -87.33654
    lse[:, 2] = np.nextafter(np.float32(12345.678), np.inf)
    lse[0, 3], lse[1, 3] = -np.inf, np.nan
    lse[:, 4] = -np.inf
    out = out.at[0, 3].set(jnp.nan).at[1, 3].set(jnp.nan).at[:, 4].set(jnp.nan)
    return out, jnp.asarray(lse)


@NEEDS_RANKS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inv_11_backends_are_the_same_merge(backend, dtype):
    """Each backend equals the merge of all parts in one place; in bfloat16 the LSE still arrives bit for bit."""
    out, lse = parts_of(dtype)
    merged = merge_on_mesh(backend)(out, lse)
    want = merge(out, lse)[0]
    assert merged.dtype == jnp.float32 and merged.shape == (TOKENS, HEADS, WIDTH)
    np.testing.assert_allclose(merged, want, atol=1e-6)
    np.testing.assert_array_equal(merged[4], np.zeros((HEADS, WIDTH)))
    # An LSE rounded to bfloat16 would be noticed.
    rounded = merge(out, lse.astype(jnp.bfloat16).astype(jnp.float32))[0]
    assert np.abs(rounded - want).max() > 1e-3


@NEEDS_RANKS
@pytest.mark.parametrize("backend", BACKENDS)
def test_inv_11_head_order_is_kept(backend):
    """The head's number is in its value: rank r gets heads r·H/N … of all."""
    head = jnp.broadcast_to(jnp.arange(HEADS, dtype=jnp.float32)[:, None], (RANKS, TOKENS, HEADS, WIDTH))
    lse = jnp.asarray(np.random.default_rng(3).normal(size=(RANKS, TOKENS, HEADS)), jnp.float32)
    merged = merge_on_mesh(backend)(head, lse)
    np.testing.assert_allclose(merged, head[0], atol=1e-6)
    for shard in merged.addressable_shards:
        first = shard.index[1].start or 0
        assert shard.data.shape == (TOKENS, HEADS // RANKS, WIDTH)
        np.testing.assert_allclose(shard.data[0, :, 0], np.arange(first, first + HEADS // RANKS), atol=1e-6)


def test_backend_names_are_checked():
    assert check_backend("a2a") == "a2a"
    with pytest.raises(ConfigError, match="'nccl' is not known; use one of"):
        check_backend("nccl")


BAD = (0.0, np.inf, np.nan)


def broken_kernel(q, pool, layer, rows, count, *, value_width, scale, **choice):
    """A kernel whose tokens without keys report NaN output and a wrong LSE: 0, +inf and NaN in turn."""
    out, lse = sparse_mla(q, pool, layer, rows, count, value_width=value_width, scale=scale, **choice)
    bad = jnp.array(BAD)[jnp.arange(len(count)) % 3]
    empty = count == 0
    return jnp.where(empty[:, None, None], jnp.nan, out), jnp.where(empty[:, None], bad[:, None], lse)


@pytest.mark.skipif(ON_GPU, reason="kernels report what is asked for, and nothing stands between")
@pytest.mark.parametrize(
    "dcp, options",
    [
        (8, AttentionOptions("ag_rs", "queries")),
        (8, AttentionOptions("a2a", "queries")),
        (8, AttentionOptions("psum", "queries")),
        (8, AttentionOptions("ag_rs", "rows", PAGE)),
        (1, AttentionOptions()),
    ],
    ids=["ag_rs", "a2a", "psum", "rows", "dcp1"],
)
def test_inv_7_br_06_short_prompts_with_a_broken_kernel(dcp, options, monkeypatch):
    """Lengths 1 … 8 on 8 ranks: most ranks have no keys. Each length meets each wrong LSE; padding gives zeros."""
    monkeypatch.setattr(attention, "sparse_mla", broken_kernel)
    geometry, world = Geometry(dcp, num_pages=16), World.make(range(1, 9), 2, num_pages=16)
    queries = Queries.make([(b, b) for b in range(8) for _ in BAD], 27)
    _, chosen, out = run(world, world.pools(geometry), queries, geometry, options=options, function=fresh_layer())
    check(world, queries, chosen, out)
    np.testing.assert_array_equal(out[24:], np.zeros_like(out[24:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inv_11_bfloat16_attention(backend):
    """Queries and pools in bfloat16: all backends stay within its rounding of the oracle."""
    geometry, world = Geometry(4, num_pages=16), World.make(range(1, 9), 2, num_pages=16)
    world.latent = np.asarray(jnp.asarray(world.latent, jnp.bfloat16), np.float32)
    queries = Queries.make([(b, b) for b in range(8)], 8)
    queries.q = np.asarray(jnp.asarray(queries.q, jnp.bfloat16))
    pools = [
        pool.replace(data=pool.data.astype(jnp.bfloat16), record=dataclasses.replace(pool.record, dtype=jnp.bfloat16))
        for pool in world.pools(geometry)
    ]
    _, chosen, out = run(world, pools, queries, geometry, options=AttentionOptions(backend, "queries"))
    assert out.dtype == jnp.bfloat16
    want = oracle_output(world, queries, slots_of(chosen))
    np.testing.assert_allclose(out.astype(np.float32), want, atol=3e-2)
