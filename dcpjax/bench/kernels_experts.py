"""Time of the routed experts of one layer in bfloat16. Prediction: each chosen expert is read once, at 4.4 TB/s."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.bench.chain import chain_us, row
from dcpjax.pallas_kernels.experts import MOST_TOKENS, experts_ffn

EXPERTS, PER_TOKEN, INNER, WIDTH = 256, 8, 2048, 6144
TOKENS = (1, 4, 16, 64, 256)
CONTIGUOUS_CEILING = 4.4e12


def measure(
    tokens: tuple[int, ...] = TOKENS, arms: tuple[str, ...] = ("triton", "mosaic", "xla")
) -> list[dict[str, Any]]:
    """A row for every number of tokens and arm. Routing is uniform."""
    stacks = weights()
    rows = []
    for count in tokens:
        x, experts, share = inputs(count)
        nbytes = len(np.unique(experts)) * 3 * INNER * WIDTH * 2
        for arm in arms:
            if arm == "triton" and count > MOST_TOKENS:
                continue

            def call(x, experts, share, gate, up, down, arm=arm):
                return experts_ffn(x, experts, share, gate, up, down, backend=arm)

            us = chain_us(call, (x, jnp.asarray(experts), share, *stacks), 20 if arm == "triton" else 4)
            shape = {"tokens": count, "active": len(np.unique(experts))}
            rows.append(row("experts", arm, us, nbytes, nbytes / CONTIGUOUS_CEILING * 1e6, **shape))
    return rows


def weights() -> tuple[jax.Array, ...]:
    """Random stacks: gate, up, down."""
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * 0.02, static_argnums=1)
    return tuple(make(jax.random.key(i), shape) for i, shape in enumerate(shapes))


def inputs(tokens: int, seed: int = 0) -> tuple[jax.Array, np.ndarray, jax.Array]:
    """Random tokens, their experts and weights."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(tokens)]).astype(np.int32)
    x = jax.random.normal(jax.random.key(9), (tokens, WIDTH), jnp.bfloat16)
    return x, experts, jnp.asarray(rng.random((tokens, PER_TOKEN)), jnp.float32)
