"""Which pairs of a token and one of its experts a program of the experts' kernel serves.

For a few tokens each program finds that itself: the first pair of an expert serves all tokens that chose it, the programs of
the others end at once. With more tokens most of them did not choose a given expert, and computing them all would take longer
than reading its weights; so tiles of pairs are listed before.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def listed(experts: jax.Array, num_experts: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of up to `rows` pairs of one expert: its number `[n]` int32, −1 for tiles past the last, and the pairs
    `[n, rows]` int32, those from `T · k` on for places that are free.

    `experts [T, k]` int32, −1 for one that is left out. n is enough for any routing; tiles of an expert are neighbours.
    """
    pairs = experts.size
    flat = jnp.where(experts < 0, num_experts, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    tiles = -(-counts // rows)
    ends, starts = jnp.cumsum(tiles), jnp.cumsum(counts) - counts
    number = jnp.arange(min(pairs, num_experts + pairs // rows), dtype=jnp.int32)
    expert = jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32)
    used = expert < num_experts
    of = jnp.where(used, expert, 0)
    place = (number - (ends - tiles)[of])[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)
    real = used[:, None] & (place < counts[of][:, None])
    pair = order[jnp.where(real, starts[of][:, None] + place, 0)]
    return jnp.where(used, expert, -1), jnp.where(real, pair, pairs + jnp.arange(rows, dtype=jnp.int32))


def of_tile(expert_ref: Any, pair_ref: Any, pairs: int, per_token: int) -> tuple[jax.Array, ...]:
    """Of this program, from `listed`: its expert, whether it has any, its pairs `[rows]` or spare rows, which of them are
    real, and their tokens; numbers are int32."""
    tile = pl.program_id(1)
    expert, pair = expert_ref[tile], pair_ref[tile, ...]
    real = pair < pairs
    return expert, expert >= 0, pair, real, jnp.where(real, pair // per_token, 0)


def of_pair(flat_ref: Any, tokens: int, per_token: int, rows: int) -> tuple[jax.Array, ...]:
    """The same for the program of a pair, which serves all tokens if the pair is its expert's first. `flat_ref [P]`: the
    experts of all pairs, int32."""
    pair = pl.program_id(1)
    expert = flat_ref[pair]
    every = flat_ref[...]
    place = jnp.arange(every.shape[0], dtype=jnp.int32)
    mine = every == expert
    first = (expert >= 0) & (jnp.sum((mine & (place < pair)).astype(jnp.int32)) == 0)
    token = jnp.arange(rows, dtype=jnp.int32)
    at = jnp.full((rows,), -1, jnp.int32)
    for j in range(per_token):
        it = jnp.minimum(token, tokens - 1) * per_token + j
        at = jnp.where((flat_ref[it] == expert) & (token < tokens), it, at)
    return expert, first, jnp.where(at < 0, tokens * per_token + token, at), at >= 0, jnp.minimum(token, tokens - 1)


def of_one(flat_ref: Any, per_token: int) -> tuple[jax.Array, ...]:
    """The same for the program of a pair that serves it alone; its pair and token are int32 scalars, and the pair is real.
    `flat_ref [P]`: the experts of all pairs, int32."""
    pair = pl.program_id(1)
    expert = flat_ref[pair]
    return expert, expert >= 0, pair, True, pair // per_token
