"""The indexer's scan of keys. Prediction: the keys are read once, at the read ceiling, or multiplied at 800 TFLOP/s."""

import functools

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, Case
from dcpjax.pallas_kernels.indexer_scores import indexer_scores
from dcpjax.pallas_kernels.records import pack_rows

HEADS, DIM, PAGE = 32, 128, 64
SHAPES = tuple((b, length) for b in (1, 16, 64) for length in (2**15, 2**17, 2**20))


def cases(
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    queries: tuple[int, ...] = (1, 4),
    arms: tuple[str, ...] = ("mosaic", "xla"),
) -> list[Case]:
    """One for every number of requests and length, storage, tokens a request and arm."""
    found = []
    for requests, length in shapes:
        for fp8 in (False, True):
            for count in queries:
                for arm in arms:
                    if arm == "xla" and (fp8 or count > 1):
                        continue

                    def call(number, q, weight, pool, pages, row_of, end, arm=arm):
                        return indexer_scores(q, weight, pool, 0, pages, row_of, visible=(0, end), backend=arm)

                    nbytes = requests * length * (DIM + 4 if fp8 else 2 * DIM)
                    products = 2 * requests * length * count * HEADS * DIM
                    shape = {"requests": requests, "length": length, "queries": count, "keys": "fp8" if fp8 else "bf16"}
                    found.append(
                        Case(
                            "indexer",
                            arm,
                            shape,
                            call,
                            functools.partial(_inputs, requests, length, count, fp8),
                            nbytes,
                            max(nbytes / READ_CEILING, products / 800e12) * 1e6,
                            calls=4 if arm == "xla" or nbytes > 2**30 else 16 if nbytes > 2**26 else 78,
                        )
                    )
    return found


def _inputs(requests: int, length: int, queries: int, fp8: bool) -> tuple[jax.Array, ...]:
    """Random queries, weights, keys, block tables, rows and ends."""
    key = iter(jax.random.split(jax.random.key(0), 4))
    tokens, pages = requests * queries, requests * length // PAGE
    q = jax.random.normal(next(key), (tokens, HEADS, DIM), jnp.bfloat16)
    weight = jax.random.normal(next(key), (tokens, HEADS), jnp.float32)
    pool = _keys(next(key), (1, pages, PAGE, DIM), fp8)
    table = jax.random.permutation(next(key), pages).astype(jnp.int32).reshape(requests, -1)
    row_of = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), queries)
    return q, weight, pool, table, row_of, jnp.full(tokens, length - 5, jnp.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _keys(key, shape, fp8):
    keys = jax.random.normal(key, shape, jnp.bfloat16)  # fused with what follows, because it is large
    return pack_rows(keys, shape[-1]) if fp8 else keys
