"""Time of the selection of 2048 scores, and of merging what ranks selected. Prediction: see `_predicted`."""

from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, chain_us, row
from dcpjax.pallas_kernels.topk import merge_candidates, topk_slots

TOPK = 2048
SHAPES = tuple((b, length) for b in (1, 16, 64) for length in (2**15, 2**17, 2**20))
PASSES = 7


def measure(
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    merges: tuple[tuple[int, int], ...] = ((1, 2), (16, 2), (64, 2), (16, 8)),
    arms: tuple[str, ...] = ("triton", "xla"),
) -> list[dict[str, Any]]:
    """A row for every number of rows, length and arm; and for the merge of some rows' candidates from some ranks."""
    rows = []
    for count, length in shapes:
        score = jax.random.normal(jax.random.key(1), (count, length), jnp.float32)
        for arm in arms:

            def select(score, arm=arm):
                return topk_slots(score, jnp.arange(score.shape[1], dtype=jnp.int32), TOPK, backend=arm)

            nbytes = 4 * count * length
            us = chain_us(select, (score,), 78 if arm == "triton" else 4)
            rows.append(row("topk", arm, us, nbytes, _predicted(nbytes), rows=count, length=length))
    for count, ranks in merges:
        score = jax.random.normal(jax.random.key(2), (count, ranks * TOPK), jnp.float32)
        slot = jax.random.permutation(jax.random.key(3), ranks * TOPK).astype(jnp.int32)
        slot = jnp.broadcast_to(slot, score.shape)
        for arm in arms:

            def merge(score, slot, arm=arm):
                return merge_candidates(score, slot, TOPK, backend=arm)

            nbytes = 8 * count * ranks * TOPK
            us = chain_us(merge, (score, slot), 20)
            rows.append(row("topk merge", arm, us, nbytes, 2 * _predicted(nbytes / 2), rows=count, ranks=ranks))
    return rows


def _predicted(nbytes: float) -> float:
    """Passes over the scores, from the cache where they fit (three times as fast), and 3 µs a launch."""
    rate = READ_CEILING * (3 if nbytes < 40e6 else 1)
    return PASSES * (3 + nbytes / rate * 1e6)
