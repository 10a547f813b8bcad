"""Top-k as a set in a total order: score descending, then slot ascending. XLA reference, and the choice of the kernel.

The order is total so that a selection does not depend on how the keys are dealt out to ranks.
"""

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels.topk_triton import NO_SLOT, TopkConfig, select_triton


def canonical(score: jax.Array) -> jax.Array:
    """−0.0 in `score […]`, of any float dtype, becomes +0.0: the two are equal as scores but not in a bitwise order."""
    return jnp.where(score == 0, 0.0, score)


def topk_candidates(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """The best `k` of `score [T, C]` float32 (−inf: not visible) with slots `[C]` int32 ascending.

    Returns scores `[T, k']` and slots `[T, k']`, `k' = min(k, C)`; slot is `NO_SLOT` where fewer are visible. The set is
    the same whatever the backend; "xla" orders it by score, "triton" (for tests "interpret") by slot.
    """
    if backend == "xla":
        # `lax.top_k` puts the lower column first among equals, and columns ascend in slot.
        best, column = jax.lax.top_k(canonical(score), min(k, score.shape[1]))
        return best, jnp.where(best == -jnp.inf, NO_SLOT, slot[column])
    return select_triton(score, slot, min(k, score.shape[1]), config, backend == "interpret")


def topk_slots(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> jax.Array:
    """The slots `[T, k']` int32 of `topk_candidates`, ascending; `NO_SLOT` fills the rest."""
    found = topk_candidates(score, slot, k, config=config, backend=backend)[1]
    return jnp.sort(found, axis=1) if backend == "xla" else found


def merge_candidates(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> jax.Array:
    """The best `k` slots `[T, k']` int32 of candidates `[T, C]` from all ranks, in any order, and `NO_SLOT` for the rest.

    `score` float32 and `slot` int32 are what `topk_candidates` gave, side by side.
    """
    k = min(k, score.shape[1])
    if backend == "xla":
        order = jnp.where(slot == NO_SLOT, jnp.inf, -canonical(score))
        return jax.lax.sort((order, slot), num_keys=2)[1][:, :k]
    return select_triton(score, slot, k, config, backend == "interpret")[1]
