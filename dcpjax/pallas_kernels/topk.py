"""Top-k as a set in a total order: score descending, then slot ascending. XLA reference, and the choice of the kernel.

The order is total so that a selection does not depend on how the keys are dealt out to ranks.
"""

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels.topk_triton import TopkConfig, select_triton

# Stands for "no slot" in a selection: larger than any slot, so it sorts last. Masked before any gather.
NO_SLOT = 2**30


def canonical(score: jax.Array) -> jax.Array:
    """−0.0 in `score […]`, of any float dtype, becomes +0.0: the two are equal as scores but not in a bitwise order."""
    return jnp.where(score == 0, 0.0, score)


def _has_kernel(score: jax.Array, k: int, backend: str) -> bool:
    """Whether the kernel selects: not where everything is taken."""
    return backend != "xla" and k < score.shape[1]


def topk_candidates(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """The best `k` of `score [T, C]` float32 (−inf: not visible) with slots `[C]` int32 ascending.

    Returns scores `[T, k']` and slots `[T, k']`, `k' = min(k, C)`; slot is `NO_SLOT` where fewer are visible. The set is
    the same whatever the backend; "xla" orders it by score, "triton" (for tests "interpret") by slot.
    """
    if _has_kernel(score, k, backend):
        column, count = select_triton(score, k, config, backend == "interpret")
        found = jnp.arange(k) < count[:, None]
        column = jnp.where(found, column, 0)
        best = jnp.take_along_axis(canonical(score), column, axis=1)
        return jnp.where(found, best, -jnp.inf), jnp.where(found, slot[column], NO_SLOT)
    # `lax.top_k` puts the lower column first among equals, and columns ascend in slot.
    best, column = jax.lax.top_k(canonical(score), min(k, score.shape[1]))
    return best, jnp.where(best == -jnp.inf, NO_SLOT, slot[column])


def topk_slots(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> jax.Array:
    """The slots `[T, k']` int32 of `topk_candidates`, ascending; `NO_SLOT` fills the rest."""
    if _has_kernel(score, k, backend):
        column, count = select_triton(score, k, config, backend == "interpret")
        found = jnp.arange(k) < count[:, None]
        return jnp.where(found, slot[jnp.where(found, column, 0)], NO_SLOT)
    return jnp.sort(topk_candidates(score, slot, k)[1], axis=1)


def merge_candidates(
    score: jax.Array, slot: jax.Array, k: int, *, config: TopkConfig | None = None, backend: str = "xla"
) -> jax.Array:
    """The best `k` slots `[T, k']` int32 of candidates `[T, C]` from all ranks, ascending; `NO_SLOT` fills the rest.

    `score` float32 and `slot` int32 are what `topk_candidates` gave, side by side. The kernel selects twice: first for
    the least score that is still in, then the lowest slots among those that have it.
    """
    if _has_kernel(score, k, backend):
        interpret = backend == "interpret"
        score = jnp.where(slot == NO_SLOT, -jnp.inf, canonical(score))
        column, count = select_triton(score, k, config, interpret)
        best = jnp.take_along_axis(score, jnp.where(jnp.arange(k) < count[:, None], column, 0), axis=1)
        least = jnp.min(best, axis=1, keepdims=True)
        # Slots are below 2^24, exact in float32, and so their order among equals is a score as well.
        tied = jnp.where(score == least, -slot.astype(jnp.float32), -jnp.inf)
        column, count = select_triton(jnp.where(score > least, jnp.inf, tied), k, config, interpret)
        found = jnp.arange(k) < count[:, None]
        picked = jnp.take_along_axis(slot, jnp.where(found, column, 0), axis=1)
        return jnp.sort(jnp.where(found, picked, NO_SLOT), axis=1)
    order = jnp.where(slot == NO_SLOT, jnp.inf, -canonical(score))
    _, slot = jax.lax.sort((order, slot), num_keys=2)
    return jnp.sort(slot[:, :k], axis=1)
