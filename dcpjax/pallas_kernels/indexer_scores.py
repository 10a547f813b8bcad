"""Scores of the DSA indexer over paged keys: `Σ_j w_j · relu(q_j · k)`. XLA reference.

Source: DeepSeek-V3.2 sparse attention; GLM-5.2 folds both scale factors into the weights.
"""

import math

import jax
import jax.numpy as jnp

_TILE_BYTES = 1 << 26


def indexer_scores(
    q: jax.Array, weight: jax.Array, pool: jax.Array, layer: jax.Array | int, pages: jax.Array, row_of: jax.Array
) -> jax.Array:
    """Scores `[T, P·G]` float32 of `q [T, heads, dim]` with `weight [T, heads]` float32 against a request's keys.

    `pool [layers, pages, G, dim]` is this rank's shard, `pages [B, P]` the block tables, `row_of [T]` each token's row
    of them. Column `p·G + g` is row g of the request's p-th page. Nothing is masked: keys beyond a request's length
    give garbage, possibly NaN, which the caller replaces.
    """
    tokens = q.shape[0]
    key_bytes = pages.shape[1] * pool.shape[2] * pool.shape[3] * pool.dtype.itemsize
    most = max(1, _TILE_BYTES // key_bytes)
    tile = tokens if tokens <= most else math.gcd(tokens, 1 << (most.bit_length() - 1))

    def some(q, weight, row_of):
        keys = pool[layer, pages[row_of]].astype(q.dtype)
        keys = keys.reshape(keys.shape[0], -1, keys.shape[-1])
        highest = jax.lax.Precision.HIGHEST
        dot = jnp.einsum("thd,tkd->thk", q, keys, precision=highest, preferred_element_type=jnp.float32)
        return jnp.einsum("thk,th->tk", jax.nn.relu(dot), weight, precision=highest)

    if tile == tokens:
        return some(q, weight, row_of)

    def cut(x):
        return x.reshape(-1, tile, *x.shape[1:])

    return jax.lax.map(lambda args: some(*args), (cut(q), cut(weight), cut(row_of))).reshape(tokens, -1)
