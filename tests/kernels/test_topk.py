"""Top-k in a total order, and the merge of candidates from several ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.topk import NO_SLOT, canonical, merge_candidates, topk_candidates

candidates = jax.jit(topk_candidates, static_argnums=2)
merge = jax.jit(merge_candidates, static_argnums=2)
ROWS, SLOTS = 50, 24


def best(score, k):
    order = sorted((-float(s), i) for i, s in enumerate(score) if s != -np.inf)
    return sorted(i for _, i in order[:k])


def draw(seed):
    """Few distinct values, zeros of both signs, and slots that are not visible."""
    rng = np.random.default_rng(seed)
    score = rng.integers(-1, 3, (ROWS, SLOTS)) * rng.choice([-1.0, 1.0], (ROWS, SLOTS))
    score[rng.random((ROWS, SLOTS)) < 0.4] = -np.inf
    score[0], score[1, 1:] = -np.inf, -np.inf
    return score.astype(np.float32)


@pytest.mark.parametrize("k", [1, 5, SLOTS, SLOTS + 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_find_the_global_best(ranks, k):
    """Slots dealt out to ranks, the best k of each, merged: the best k of all, and `NO_SLOT` for what is missing."""
    score = draw(k)
    parts = [candidates(score[:, rank::ranks], jnp.arange(rank, SLOTS, ranks), k) for rank in range(ranks)]
    merged = np.sort(merge(jnp.concatenate([s for s, _ in parts], 1), jnp.concatenate([i for _, i in parts], 1), k))
    assert merged.shape == (ROWS, min(k, SLOTS))
    for row, want in zip(merged, (best(s, k) for s in score)):
        assert row.tolist() == want + [NO_SLOT] * (len(row) - len(want))


def test_order_of_candidates_does_not_matter():
    """The order is total: no rank's place in the list decides."""
    score = draw(7)
    found, slot = (np.asarray(x) for x in candidates(score, jnp.arange(SLOTS), SLOTS))
    want = np.sort(merge(found, slot, 5))
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(SLOTS)
        np.testing.assert_array_equal(np.sort(merge(found[:, order], slot[:, order], 5)), want)


def test_scores_that_are_not_visible_have_no_slot():
    score, slot = candidates(np.array([[-np.inf, 3, -np.inf]], np.float32), jnp.arange(3), 3)
    assert slot.tolist() == [[1, NO_SLOT, NO_SLOT]]
    assert score.tolist() == [[3, -np.inf, -np.inf]]
    assert NO_SLOT > 2**20 and np.int32(NO_SLOT) == NO_SLOT


def test_canonical_zero():
    zeros = np.asarray(jax.jit(canonical)(np.array([-0.0, 0.0, -1.0], np.float32)))
    assert np.signbit(zeros).tolist() == [False, False, True]
