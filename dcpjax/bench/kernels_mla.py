"""Time of sparse MLA over the layers of a step: 78 calls in one program, each over rows of a layer of its own.

Prediction: rows are read once at the read ceiling, or the products take their time where that is longer; and 3 µs a
launch, of which there are two where lists are split.
"""

import concurrent.futures
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, row, run_us
from dcpjax.pallas_kernels.cache_write import pack_latent
from dcpjax.pallas_kernels.sparse_mla import SparseMLAConfig, sparse_mla

VALUE, ROPE, TOPK, LAYERS, ROWS = 512, 64, 2048, 78, 1 << 14
TOKENS, HEADS, COUNTS = (1, 4, 16, 64, 128), (16, 32, 64, 128), (512, 2048)
SCALE = 256**-0.5
MATRIX_RATE = 800e12
RECORD_BYTES = {"bfloat16": 1152, "fp8": 656}


def measure(
    tokens: tuple[int, ...] = TOKENS, heads: tuple[int, ...] = HEADS, counts: tuple[int, ...] = COUNTS,
    arms: tuple[str, ...] = ("triton", "xla"), layers: int = LAYERS, num_rows: int = ROWS,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for every number of tokens and heads, length of lists, kind of records and arm. Lists are random."""
    pools = {"bfloat16": _pool(layers, num_rows)}
    pools["fp8"] = jax.jit(pack_latent, static_argnums=1)(pools["bfloat16"], VALUE)
    cases = [
        (arm, kind, b, h, n)
        for b in tokens
        for h in heads
        for n in counts
        for kind in RECORD_BYTES
        for arm in arms
        if arm == "triton" or kind == "bfloat16"
    ]

    def compiled(case):
        arm, kind, b, h, n = case
        # XLA's programs are large, and its times do not depend on their length.
        calls = layers if arm == "triton" else min(4, layers)
        args = (*_inputs(b, h, n, num_rows), pools[kind])
        return calls, args, jax.jit(functools.partial(_chain, arm, n, calls)).lower(*args).compile()

    with concurrent.futures.ThreadPoolExecutor() as workers:
        for case, (calls, args, program) in zip(cases, workers.map(compiled, cases), strict=True):
            arm, kind, b, h, n = case
            us = run_us(program, args) / calls
            nbytes = b * n * RECORD_BYTES[kind]
            floor = max(nbytes / READ_CEILING, 2 * b * h * n * (2 * VALUE + ROPE) / MATRIX_RATE) * 1e6
            launches = 1 if SparseMLAConfig.choose(b, h, n).splits == 1 else 2
            shape = {"tokens": b, "heads": h, "count": n, "records": kind}
            yield row("sparse mla", arm, us, nbytes, floor + 3 * launches, **shape)


def _chain(arm: str, expected: int, calls: int, q, rows, count, pool):
    config = None
    if arm != "xla":
        config = SparseMLAConfig.choose(q.shape[0], q.shape[1], expected, packed=pool.dtype == jnp.uint32)

    @jax.jit  # traced once for all layers
    def one(q, layer):
        return sparse_mla(
            q, pool, layer, rows, count,
            value_width=VALUE, scale=SCALE, out_dtype=q.dtype, config=config, backend=arm,
        )  # fmt: skip

    outs = []
    for layer in range(calls):
        # Layers wait for each other, as in a step; what nobody reads would not be computed.
        q, out = jax.lax.optimization_barrier((q, one(q, jnp.int32(layer))))
        outs.append(out)
    return outs


def _pool(layers: int, num_rows: int) -> jax.Array:
    make = jax.jit(lambda key: jax.random.normal(key, (layers, num_rows, VALUE + ROPE), jnp.bfloat16))
    return make(jax.random.key(0))


def _inputs(tokens: int, heads: int, count: int, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, lists as wide as a selection, and their counts."""
    q = jax.random.normal(jax.random.key(1), (tokens, heads, VALUE + ROPE), jnp.bfloat16)
    rows = jax.random.randint(jax.random.key(2), (tokens, TOPK), 0, num_rows)
    return q, rows, jnp.full((tokens,), count, jnp.int32)
