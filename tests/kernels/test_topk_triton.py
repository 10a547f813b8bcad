"""The kernels that select: the same set as a sort, bit for bit the same each time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.topk import NO_SLOT, canonical, merge_candidates, topk_candidates, topk_slots
from dcpjax.pallas_kernels.topk_triton import TopkConfig, select_triton
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

# Rows that one program holds, that are listed first, and whose list has no room.
HELD, LISTED, FULL = (TopkConfig(room, 64, 64, 64, 32) for room in (512, 128, 16))


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
@pytest.mark.parametrize("columns, k, config", [(300, 17, HELD), (257, 100, LISTED), (300, 200, FULL)])
def test_selects_what_a_sort_does(columns, k, config, backend):
    score = draw(columns, k)
    select = jax.jit(lambda x: select_triton(x, jnp.arange(columns) * 2, k, config, backend == "interpret"))
    value, slot = found = select(score)
    for row, values, slots in zip(np.where(score == 0, 0.0, score), np.asarray(value), np.asarray(slot), strict=True):
        want = best(row, k)
        assert slots.tolist() == [2 * i for i in want] + [NO_SLOT] * (k - len(want))
        assert values.tobytes() == np.append(row[want], np.full(k - len(want), -np.inf)).astype(np.float32).tobytes()
    same_bits(found, select(score))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_that_misleads(backend):
    """Too many above the pivot, too few, and too few that are all there are."""
    score = fresh("misleads").normal(size=(3, 300)).astype(np.float32)
    score[0, : 64 * 4 : 4] -= 10
    score[1:, : 64 * 4 : 4] += 10
    score[2, 65:] = -np.inf
    call = jax.jit(lambda x: topk_slots(x, jnp.arange(300), 60, config=LISTED, backend=backend))
    assert [row.tolist() for row in np.asarray(call(score))] == [best(row, 60) for row in score]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, columns, k", [(1, 131072, 2048), (8, 100_003, 2048), (3, 1 << 20, 2048), (17, 8191, 33), (64, 9000, 2048)]
)
def test_large_on_the_device(rows, columns, k):
    rng = fresh("large", rows, columns)
    score = rng.normal(size=(rows, columns)).astype(np.float32)
    score[:, ::3] = np.round(score[:, ::3])
    score[rows // 2, : columns // 2] = -np.inf
    slot = jax.jit(topk_slots, static_argnums=2, static_argnames="backend")(
        score, jnp.arange(columns), k, backend="triton"
    )
    for row, got in zip(score, np.asarray(slot), strict=True):
        assert got.tolist() == best(row, k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_is_taken_where_there_is_no_more(backend):
    score, slot = draw(300, "slots"), jnp.arange(300) * 2 + 1
    want = np.asarray(topk_slots(score, slot, 400))
    value, got = (np.asarray(x) for x in topk_candidates(score, slot, 400, config=HELD, backend=backend))
    np.testing.assert_array_equal(got, want)
    there = np.take_along_axis(np.asarray(canonical(score)), np.where(got == NO_SLOT, 0, got // 2), axis=1)
    np.testing.assert_array_equal(value, np.where(got == NO_SLOT, -np.inf, there))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [HELD, FULL])
def test_merge_equals_the_reference(config, backend):
    """Candidates of ranks that own every third slot: equal scores go by slot, whichever rank they are from."""
    ranks, k = 3, 40
    score = draw(300, "merge")
    parts = [topk_candidates(score[:, rank::ranks], jnp.arange(rank, 300, ranks), k) for rank in range(ranks)]
    value, slot = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    got = np.sort(merge_candidates(value, slot, k, config=config, backend=backend))
    np.testing.assert_array_equal(got, np.sort(merge_candidates(value, slot, k)))
    for row, want in zip(got, (best(s, k) for s in score), strict=True):
        assert row.tolist() == want + [NO_SLOT] * (k - len(want))


@pytest.mark.parametrize(
    "rows, columns, k", [(1, 131072, 2048), (16, 100_001, 2048), (64, 2049, 2048), (3, 1 << 20, 1)]
)
def test_lowers_for_h200(rows, columns, k):
    score = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    slot = jax.ShapeDtypeStruct((columns,), jnp.int32)
    assert "topk_finish" in lower_for_h200(lambda x, s: select_triton(x, s, k), score, slot)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="at most the columns"):
        select_triton(jnp.zeros((2, 5)), jnp.arange(5), 6)
    with pytest.raises(ValueError, match="powers of two"):
        TopkConfig(room=100)
    with pytest.raises(ValueError, match="times lanes"):
        TopkConfig(chunk=512, lanes=1024)
