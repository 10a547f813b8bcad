"""The kernel that selects by radix: the same set as a sort, bit for bit the same each time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.topk import NO_SLOT, merge_candidates, topk_candidates, topk_slots
from dcpjax.pallas_kernels.topk_triton import TopkConfig, select_triton
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

# Few bits a pass are quick to compile.
SMALL = TopkConfig(64, 32, (4,) * 8)
USUAL = TopkConfig(128, 64)


def draw(columns, *names):
    """Rows of every kind: distinct, few values, zeros of both signs, nothing or little visible, all equal, extremes."""
    rng = fresh("topk", columns, *names)
    few = rng.integers(-1, 3, (2, columns)) * rng.choice([-1.0, 1.0], (2, columns))
    few[1, rng.random(columns) < 0.5] = -np.inf
    hidden = np.full((3, columns), -np.inf)
    hidden[1, columns // 2], hidden[2, -3:] = 3.0, [-0.0, 0.0, -5.0]
    extremes = rng.choice([3.4e38, -3.4e38, 2e-38, -2e-38, 0.0, -0.0, np.inf], (1, columns))
    rows = [rng.normal(size=(2, columns)), few, hidden, np.full((1, columns), 7.0), extremes]
    return np.concatenate(rows).astype(np.float32)


def best(score, k):
    """Columns of the best `k` of one row, ascending."""
    order = np.lexsort((np.arange(len(score)), -np.where(score == 0, 0.0, score).astype(np.float64)))[:k]
    return sorted(int(i) for i in order if score[i] != -np.inf)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns, k, config", [(300, 17, SMALL), (257, 200, USUAL)])
def test_selects_what_a_sort_does(columns, k, config, backend):
    score = draw(columns, k)
    select = jax.jit(lambda x: select_triton(x, k, config, backend == "interpret"))
    column, count = found = select(score)
    for row, got, n in zip(score, np.asarray(column), np.asarray(count), strict=True):
        assert got[:n].tolist() == best(row, k)
    again = select(score)
    live = np.arange(k) < np.asarray(count)[:, None]
    same_bits([np.where(live, x[0], 0) for x in (found,)], [np.where(live, x[0], 0) for x in (again,)])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, columns, k", [(1, 131072, 2048), (8, 100_003, 2048), (3, 1 << 20, 2048), (17, 8191, 33)]
)
def test_large_on_the_device(rows, columns, k):
    rng = fresh("large", rows, columns)
    score = rng.normal(size=(rows, columns)).astype(np.float32)
    score[:, ::3] = np.round(score[:, ::3])
    column, count = jax.jit(select_triton, static_argnums=1)(score, k)
    assert (np.asarray(count) == k).all()
    for row, got in zip(score, np.asarray(column), strict=True):
        assert got.tolist() == best(row, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [17, 300])
def test_slots_and_candidates_equal_the_reference(k, backend):
    """300 is all there is, which needs no selection."""
    score, slot = draw(300, "slots"), jnp.arange(300) * 2 + 1
    options = {"config": SMALL, "backend": backend}
    want = np.asarray(topk_slots(score, slot, k))
    np.testing.assert_array_equal(topk_slots(score, slot, k, **options), want)
    value, got = (np.asarray(x) for x in topk_candidates(score, slot, k, **options))
    np.testing.assert_array_equal(np.sort(got, axis=1), want)
    canonical = np.where(score == 0, 0.0, score)
    there = np.take_along_axis(canonical, np.where(got == NO_SLOT, 0, got // 2), axis=1)
    np.testing.assert_array_equal(value, np.where(got == NO_SLOT, -np.inf, there))


@pytest.mark.parametrize("backend", BACKENDS)
def test_merge_equals_the_reference(backend):
    """Candidates of ranks that own every third slot: equal scores go by slot, whichever rank they are from."""
    ranks, k = 3, 40
    score = draw(300, "merge")
    parts = [topk_candidates(score[:, rank::ranks], jnp.arange(rank, 300, ranks), k) for rank in range(ranks)]
    value, slot = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    got = np.asarray(merge_candidates(value, slot, k, config=SMALL, backend=backend))
    np.testing.assert_array_equal(got, merge_candidates(value, slot, k))
    for row, want in zip(got, (best(s, k) for s in score), strict=True):
        assert row.tolist() == want + [NO_SLOT] * (k - len(want))


@pytest.mark.parametrize(
    "rows, columns, k", [(1, 131072, 2048), (16, 100_001, 2048), (64, 2049, 2048), (3, 1 << 20, 1)]
)
def test_lowers_for_h200(rows, columns, k):
    score = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    assert "topk_compact" in lower_for_h200(lambda x: select_triton(x, k), score)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="at most the columns"):
        select_triton(jnp.zeros((2, 5)), 6)
    with pytest.raises(ValueError, match="32 in all"):
        TopkConfig(digits=(6, 6))
    with pytest.raises(ValueError, match="multiple of lanes"):
        TopkConfig(chunk=100)
