"""Scores of the DSA indexer over paged keys: `Σ_j w_j · relu(q_j · k)`. XLA reference, and the choice of the kernel.

Source: DeepSeek-V3.2 sparse attention; GLM-5.2 folds both scale factors into the weights.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dcpjax.pallas_kernels.indexer_scores_triton import IndexerConfig, scores_triton
from dcpjax.pallas_kernels.mosaic_config import MosaicScoresConfig, has_keys
from dcpjax.pallas_kernels.records import unpack_rows

_TILE_BYTES = 1 << 26
# Tokens that share one read of the keys.
MOST_QUERIES = 8
# Of all requests: fewer were not measured.
_LEAST_KEYS = 2**12


def indexer_scores(
    q: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    pages: jax.Array,
    row_of: jax.Array,
    *,
    visible: tuple[jax.Array | int, jax.Array] | None = None,
    queries: int | None = None,
    config: IndexerConfig | MosaicScoresConfig | None = None,
    backend: str = "xla",
    invariant: bool = False,
) -> jax.Array:
    """Scores `[T, P·G]` float32 of `q [T, heads, dim]` with `weight [T, heads]` float32 against a request's keys.

    `pool [layers, pages, G, dim]` is this rank's shard, `pages [B, P]` int32 the block tables, `row_of [T]` int32 each
    token's row of them. Column `p·G + g` is row g of the request's p-th page. A pool of uint32 holds packed records.

    `visible` is `(first, end [T])`, int32 columns: token t sees `first ≤ column < end[t]` and gets −inf elsewhere; pages
    past all of them are not read. Without it nothing is masked: keys beyond a request's length give garbage, possibly
    NaN, which the caller replaces.

    `backend` is "xla", "triton", "mosaic" or, for tests, "interpret". "mosaic" is the kernel for Hopper where it serves
    these arguments and its start is worth it, and the other one elsewhere. `queries` is the tokens that share one read of the
    keys there: the tokens of each row when all rows have as many (default: T / B, at most 8). It decides speed alone:
    neighbours that turn out to belong to different rows are taken in turn. `invariant`: one kernel for all numbers of tokens
    and keys, since two of them round differently. Raises `NotImplementedError` where the kernel does not serve these
    arguments.
    """
    tokens, heads, dim = q.shape
    if queries is None:
        queries = min(max(tokens // pages.shape[0], 1), MOST_QUERIES)
    served = q.dtype == jnp.bfloat16 and has_keys(dim, heads, pool.shape[2], pool.dtype)
    if isinstance(config, MosaicScoresConfig) or (
        backend == "mosaic" and served and (invariant or _pays(q, pool, pages, queries))
    ):
        # Not before it is needed: it brings a compiler along.
        from dcpjax.pallas_kernels.indexer_scores_mosaic import scores_mosaic

        return scores_mosaic(q, weight, pool, layer, pages, row_of, visible, queries, config)
    if backend != "xla":
        interpret = backend == "interpret"
        return scores_triton(q, weight, pool, layer, pages, row_of, visible, queries, config, interpret)
    score = _scores_xla(q, weight, pool, layer, pages, row_of)
    if visible is None:
        return score
    first, end = visible
    column = jnp.arange(score.shape[1])
    return jnp.where((column >= first) & (column < end[:, None]), score, -jnp.inf)


def _pays(q: jax.Array, pool: jax.Array, pages: jax.Array, queries: int) -> bool:
    """Whether the kernel for Hopper is the faster one, for what `indexer_scores` is given."""
    return pl.cdiv(q.shape[0], queries) * pages.shape[1] * pool.shape[2] >= _LEAST_KEYS


def _scores_xla(q, weight, pool, layer, pages, row_of):
    tokens = q.shape[0]
    key_bytes = pages.shape[1] * pool.shape[2] * pool.shape[3] * pool.dtype.itemsize
    most = max(1, _TILE_BYTES // key_bytes)
    tile = tokens if tokens <= most else math.gcd(tokens, 1 << (most.bit_length() - 1))

    def some(q, weight, row_of):
        keys = pool[layer, pages[row_of]]
        if pool.dtype == jnp.uint32:
            keys = unpack_rows(keys, q.shape[2])
        keys = keys.astype(q.dtype).reshape(keys.shape[0], -1, keys.shape[-1])
        highest = jax.lax.Precision.HIGHEST
        dot = jnp.einsum("thd,tkd->thk", q, keys, precision=highest, preferred_element_type=jnp.float32)
        return jnp.einsum("thk,th->tk", jax.nn.relu(dot), weight, precision=highest)

    if tile == tokens:
        return some(q, weight, row_of)

    def cut(x):
        return x.reshape(-1, tile, *x.shape[1:])

    return jax.lax.map(lambda args: some(*args), (cut(q), cut(weight), cut(row_of))).reshape(tokens, -1)
