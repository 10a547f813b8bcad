"""Time of the indexer's scan of keys. Prediction: the keys are read once, at the read ceiling."""

from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, chain_us, row
from dcpjax.pallas_kernels.indexer_scores import indexer_scores, pack_keys

HEADS, DIM, PAGE = 32, 128, 64
SHAPES = tuple((b, length) for b in (1, 16, 64) for length in (2**15, 2**17, 2**20))


def measure(
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    queries: tuple[int, ...] = (1, 4),
    arms: tuple[str, ...] = ("triton", "xla"),
) -> list[dict[str, Any]]:
    """A row for every number of requests and length, storage, tokens a request and arm."""
    rows = []
    for requests, length in shapes:
        for fp8 in (False, True):
            for count in queries:
                for arm in arms:
                    if arm == "xla" and (fp8 or count > 1):
                        continue
                    args = inputs(requests, length, count, fp8)

                    def call(q, weight, pool, pages, row_of, end, arm=arm):
                        return indexer_scores(q, weight, pool, 0, pages, row_of, visible=(0, end), backend=arm)

                    nbytes = requests * length * (DIM + 4 if fp8 else 2 * DIM)
                    calls = 78 if arm == "triton" and nbytes < 2**31 else 4
                    us = chain_us(call, args, calls)
                    shape = {"requests": requests, "length": length, "queries": count, "keys": "fp8" if fp8 else "bf16"}
                    rows.append(row("indexer", arm, us, nbytes, nbytes / READ_CEILING * 1e6, **shape))
                    del args
    return rows


def inputs(requests: int, length: int, queries: int, fp8: bool) -> tuple[jax.Array, ...]:
    """Random queries, weights, keys, block tables, rows and ends."""
    key = iter(jax.random.split(jax.random.key(0), 4))
    tokens, pages = requests * queries, requests * length // PAGE
    q = jax.random.normal(next(key), (tokens, HEADS, DIM), jnp.bfloat16)
    weight = jax.random.normal(next(key), (tokens, HEADS), jnp.float32)
    shape = (1, pages, PAGE, DIM)
    # Fused, because it is large.
    make = jax.jit(lambda key: (pack_keys if fp8 else jnp.asarray)(jax.random.normal(key, shape, jnp.bfloat16)))
    pool = make(next(key))
    table = jax.random.permutation(next(key), pages).astype(jnp.int32).reshape(requests, -1)
    row_of = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), queries)
    return q, weight, pool, table, row_of, jnp.full(tokens, length - 5, jnp.int32)
