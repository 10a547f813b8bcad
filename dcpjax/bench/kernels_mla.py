"""Sparse MLA over the layers of a step: 78 calls in one program, each over rows of a layer of its own.

Prediction: rows are read once at the read ceiling, or the products take their time where that is longer; and 3 µs a
launch, of which there are two where lists are split and a second kernel merges their splits.
"""

import functools

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import READ_CEILING, Case
from dcpjax.pallas_kernels.records import pack_rows
from dcpjax.pallas_kernels.sparse_mla import MosaicMLAConfig, SparseMLAConfig, fitting, is_ahead, sparse_mla

VALUE, ROPE, TOPK, LAYERS, ROWS = 512, 64, 2048, 78, 1 << 14
TOKENS, HEADS, COUNTS = (1, 4, 16, 64, 128), (16, 32, 64, 128), (512, 2048)
SCALE = 256**-0.5
MATRIX_RATE = 800e12
RECORD_BYTES = {"bfloat16": 1152, "fp8": 656}
STORED = {"bfloat16": jnp.bfloat16, "fp8": jnp.uint32}


def cases(
    tokens: tuple[int, ...] = TOKENS, heads: tuple[int, ...] = HEADS, counts: tuple[int, ...] = COUNTS,
    arms: tuple[str, ...] = ("triton", "mosaic", "xla"), layers: int = LAYERS, num_rows: int = ROWS,
) -> list[Case]:  # fmt: skip
    """One for every number of tokens and heads, length of lists, kind of records and arm. Lists are random.

    The kernel for Hopper where it is ahead; where it is an arm, also the best one for whole lists of 64 heads whose bits
    do not depend on the other tokens.
    """
    found = [
        _case(arm, kind, b, h, n, layers, num_rows)
        for b in tokens
        for h in heads
        for n in counts
        for kind in RECORD_BYTES
        for arm in arms
        if arm == "triton" or (kind == "bfloat16" if arm == "xla" else is_ahead(b, h, n, kind == "fp8"))
    ]
    if "mosaic" in arms and 64 in heads and TOPK in counts:
        for kind, dtype in STORED.items():
            for b in tokens:
                arm, _ = fitting("mosaic", (b, 64, VALUE + ROPE), VALUE, dtype, jnp.bfloat16, TOPK, invariant=True)
                found.append(_case(arm, kind, b, 64, TOPK, layers, num_rows, invariant=True))
    return found


def _case(
    arm: str, kind: str, b: int, h: int, n: int, layers: int, num_rows: int, invariant: bool = False
) -> Case:  # fmt: skip
    choose = MosaicMLAConfig.choose if arm == "mosaic" else SparseMLAConfig.choose
    config = choose(b, h, n, packed=kind == "fp8", invariant=invariant)

    def call(layer, q, rows, count, pool):
        return sparse_mla(
            q, pool, layer, rows, count,
            value_width=VALUE, scale=SCALE, out_dtype=q.dtype, config=None if arm == "xla" else config, backend=arm,
        )  # fmt: skip

    def inputs():
        q = jax.random.normal(jax.random.key(1), (b, h, VALUE + ROPE), jnp.bfloat16)
        rows = jax.random.randint(jax.random.key(2), (b, TOPK), 0, num_rows)  # as wide as a selection
        return q, rows, jnp.full((b,), n, jnp.int32), _pool(layers, num_rows, kind)

    nbytes = b * n * RECORD_BYTES[kind]
    floor = max(nbytes / READ_CEILING, 2 * b * h * n * (2 * VALUE + ROPE) / MATRIX_RATE) * 1e6
    merged = arm == "mosaic" and config.clustered(config.splits, h)
    launches = 1 if (config.splits == 1 and not invariant) or merged else 2
    shape = {"tokens": b, "heads": h, "count": n, "records": kind, "invariant": invariant}
    # XLA's programs are large, and its times do not depend on their length.
    calls = min(4, layers) if arm == "xla" else layers
    return Case("sparse mla", arm, shape, call, inputs, nbytes, floor + 3 * launches, calls)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pool(layers, num_rows, kind):
    rows = jax.random.normal(jax.random.key(0), (layers, num_rows, VALUE + ROPE), jnp.bfloat16)
    return pack_rows(rows, VALUE) if kind == "fp8" else rows
