"""The routed experts of one layer in bfloat16. Prediction: each chosen expert is read once, at 4.4 TB/s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.bench.chain import Case
from dcpjax.pallas_kernels.experts import MOST_TOKENS, experts_ffn

EXPERTS, PER_TOKEN, INNER, WIDTH = 256, 8, 2048, 6144
TOKENS = (1, 4, 16, 64, 256)
CONTIGUOUS_CEILING = 4.4e12


def cases(tokens: tuple[int, ...] = TOKENS, arms: tuple[str, ...] = ("triton", "mosaic", "xla")) -> list[Case]:
    """One for every number of tokens and arm. Routing is uniform."""
    found = []
    for count in tokens:
        active = len(np.unique(_routing(count)))
        nbytes = active * 3 * INNER * WIDTH * 2
        for arm in arms:
            if arm == "triton" and count > MOST_TOKENS:
                continue

            def call(number, x, experts, share, gate, up, down, arm=arm):
                return experts_ffn(x, experts, share, gate, up, down, backend=arm)

            calls, shape = 20 if arm == "triton" else 4, {"tokens": count, "active": active}
            inputs = functools.partial(_inputs, count)
            found.append(Case("experts", arm, shape, call, inputs, nbytes, nbytes / CONTIGUOUS_CEILING * 1e6, calls))
    return found


def _routing(tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(tokens)]).astype(np.int32)


def _inputs(tokens: int) -> tuple[jax.Array, ...]:
    """Random tokens, their experts and weights, and the stacks of gate, up and down."""
    x = jax.random.normal(jax.random.key(9), (tokens, WIDTH), jnp.bfloat16)
    share = jax.random.uniform(jax.random.key(8), (tokens, PER_TOKEN))
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    return x, jnp.asarray(_routing(tokens)), share, *(_stack(jax.random.key(i), s) for i, s in enumerate(shapes))


@functools.partial(jax.jit, static_argnums=1)
def _stack(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16) * 0.02
