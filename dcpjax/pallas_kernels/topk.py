"""Top-k as a set in a total order: score descending, then slot ascending. XLA reference.

The order is total so that a selection does not depend on how the keys are dealt out to ranks.
"""

import jax
import jax.numpy as jnp

# Stands for "no slot" in a selection: larger than any slot, so it sorts last. Masked before any gather.
NO_SLOT = 2**30


def canonical(score: jax.Array) -> jax.Array:
    """−0.0 becomes +0.0: the two are equal as scores but not in a bitwise order."""
    return jnp.where(score == 0, 0.0, score)


def topk_candidates(score: jax.Array, slot: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The best `k` of `score [T, C]` (−inf: not visible) with slots `[C]` ascending.

    Returns scores `[T, k']` and slots `[T, k']`, `k' = min(k, C)`; slot is `NO_SLOT` where fewer are visible.
    `lax.top_k` puts the lower column first among equals, and columns ascend in slot.
    """
    best, column = jax.lax.top_k(canonical(score), min(k, score.shape[1]))
    return best, jnp.where(best == -jnp.inf, NO_SLOT, slot[column])


def merge_candidates(score: jax.Array, slot: jax.Array, k: int) -> jax.Array:
    """The best `k` slots `[T, k]` of candidates `[T, C]` from all ranks, ascending; `NO_SLOT` fills the rest."""
    order = jnp.where(slot == NO_SLOT, jnp.inf, -canonical(score))
    _, slot = jax.lax.sort((order, slot), num_keys=2)
    return jnp.sort(slot[:, :k], axis=1)
