"""The routed experts of one layer, in bfloat16 and quantised, beside JAX's own grouped products.

Prediction: each chosen expert is read once, at 4.4 TB/s, or where that takes longer, products run at 800 TFLOP/s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.bench.chain import Case
from dcpjax.pallas_kernels.experts import experts_ffn, experts_grouped
from dcpjax.quant import QArray
from models.stored import FP8, NVFP4, Format

EXPERTS, PER_TOKEN, INNER, WIDTH = 256, 8, 2048, 6144
TOKENS = (1, 4, 16, 64, 128, 256, 2048)
CONTIGUOUS_CEILING = 4.4e12
PRODUCTS = 8e14
# XLA takes 52 ms for 256 tokens.
MOST_XLA = 64


def cases(tokens: tuple[int, ...] = TOKENS, arms: tuple[str, ...] = ("triton", "grouped", "xla")) -> list[Case]:
    """One for every number of tokens and arm, and for quantised stacks those that read them as they are. Routing is
    uniform."""
    found = []
    for count in tokens:
        for arm in arms:
            for form in (None, FP8, NVFP4) if arm == "triton" else (None,):
                if arm != "xla" or count <= MOST_XLA:
                    found.append(_case(count, arm, form))
    return found


def _case(tokens: int, arm: str, form: Format | None) -> Case:
    def call(number, x, experts, share, gate, up, down):
        if arm == "grouped":
            return experts_grouped(x, experts, share, gate, up, down, _grouped)
        layer = None if form is None else number % _layers(form)
        return experts_ffn(x, experts, share, gate, up, down, layer=layer, backend=arm)

    active = len(np.unique(_routing(tokens)))
    nbytes = active * 3 * INNER * WIDTH * _bytes_a_value(form)
    predicted = max(nbytes / CONTIGUOUS_CEILING, tokens * PER_TOKEN * 6 * INNER * WIDTH / PRODUCTS)
    shape = {"tokens": tokens, "active": active} | ({} if form is None else {"stacks": form.name})
    inputs = functools.partial(_inputs, tokens, form)
    calls = 20 if arm == "triton" and tokens <= 256 else 4
    return Case("experts", arm, shape, call, inputs, nbytes, predicted * 1e6, calls)


def _grouped(rows, stack, sizes):
    """JAX's own grouped product for Hopper, on Mosaic."""
    # Not before it is needed: it brings JAX's own test tools along.
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(
        rows,
        stack,
        group_sizes=sizes,
        block_m=64,
        block_n=128,
        block_k=64,
        max_concurrent_steps=6,
        grid_block_n=1,
        transpose_rhs=True,
    )


def _layers(form: Format) -> int:
    """Layers in a stack: of 2 to 4 GiB, the kernel could not have the offsets."""
    return 2 * form.per_byte


def _bytes_a_value(form: Format | None) -> float:
    """With its share of the scales."""
    if form is None:
        return 2.0
    return 1 / form.per_byte + form.scales.itemsize / (form.block[0] * form.block[1])


def _routing(tokens: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(tokens)]).astype(np.int32)


def _inputs(tokens: int, form: Format | None) -> tuple[Any, ...]:
    """Random tokens, their experts and weights, and the stacks of gate, up and down."""
    x = jax.random.normal(jax.random.key(9), (tokens, WIDTH), jnp.bfloat16)
    share = jax.random.uniform(jax.random.key(8), (tokens, PER_TOKEN))
    shapes = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    lead = (EXPERTS,) if form is None else (_layers(form), EXPERTS)
    return (
        x,
        jnp.asarray(_routing(tokens)),
        share,
        *(random_stack(form, lead, jax.random.key(i), shape[1:]) for i, shape in enumerate(shapes)),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def random_stack(form: Format | None, lead: tuple[int, ...], key: jax.Array, matrix: tuple[int, int]) -> Any:
    """Random matrices `[*lead, out, in]` in bfloat16 or a quantised format, a number about 0.02 in size."""
    out, into = matrix
    if form is None:
        return jax.random.normal(key, (*lead, out, into), jnp.bfloat16) * 0.02
    # The second bit of e4m3 is never set: no NaN, and numbers below 2.
    codes = jax.random.bits(key, (*lead, out, into // form.per_byte), jnp.uint8) & (255 if form is NVFP4 else 191)
    values = codes if form is NVFP4 else jax.lax.bitcast_convert_type(codes, form.values)
    scales = jnp.full((*lead, -(-out // form.block[0]), -(-into // form.block[1])), 0.02, form.scales)
    return QArray(values, scales, jnp.ones(lead) if form.factor else None, form.block)
