"""The selection of 2048 scores, and merging what ranks selected. Prediction: see `_predicted`."""

import functools

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, Case
from dcpjax.pallas_kernels.topk import TopkConfig, merge_candidates, topk_slots

TOPK = 2048
SHAPES = tuple((b, length) for b in (1, 16, 64) for length in (2**15, 2**17, 2**20))
PASSES, LAUNCHES = 2, 5


def cases(
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    merges: tuple[tuple[int, int], ...] = tuple((b, ranks) for ranks in (2, 8) for b in (1, 16, 64)),
    arms: tuple[str, ...] = ("triton", "xla"),
) -> list[Case]:
    """One for every number of rows, length and arm; and for the merge of some rows' candidates from some ranks."""
    found = []
    for count, length in shapes:
        for arm in arms:

            def select(number, score, arm=arm):
                return topk_slots(score, jnp.arange(score.shape[1], dtype=jnp.int32), TOPK, backend=arm)

            nbytes, shape = 4 * count * length, {"rows": count, "length": length}
            inputs = functools.partial(_scores, count, length)
            found.append(Case("topk", arm, shape, select, inputs, nbytes, _predicted(nbytes), _calls(arm)))
    for count, ranks in merges:
        for arm in arms:

            def merge(number, score, slot, arm=arm):
                return merge_candidates(score, slot, TOPK, backend=arm)

            nbytes, shape = 8 * count * ranks * TOPK, {"rows": count, "ranks": ranks}
            inputs = functools.partial(_candidates, count, ranks)
            found.append(
                Case("topk merge", arm, shape, merge, inputs, nbytes, _merge_predicted(count, ranks), _calls(arm))
            )
    return found


def _calls(arm: str) -> int:
    return 16 if arm == "triton" else 4


def _predicted(nbytes: float) -> float:
    """Two passes over the scores, from the cache where they fit (three times as fast), and 3 µs a launch."""
    rate = READ_CEILING * (3 if nbytes < 40e6 else 1)
    return LAUNCHES * 3 + PASSES * nbytes / rate * 1e6


def _merge_predicted(count: int, ranks: int) -> float:
    """Few candidates are selected in one launch, of 8 µs, others as scores are."""
    columns = ranks * TOPK
    return 8 if columns <= TopkConfig().room else _predicted(4 * count * columns)


def _scores(count: int, length: int) -> tuple[jax.Array]:
    return (jax.random.normal(jax.random.key(1), (count, length), jnp.float32),)


def _candidates(count: int, ranks: int) -> tuple[jax.Array, jax.Array]:
    score = jax.random.normal(jax.random.key(2), (count, ranks * TOPK), jnp.float32)
    slot = jax.random.permutation(jax.random.key(3), ranks * TOPK).astype(jnp.int32)
    return score, jnp.broadcast_to(slot, score.shape)
