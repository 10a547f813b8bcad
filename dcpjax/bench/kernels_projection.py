"""Dense products with FP8 matrices of GLM-5.2. Prediction: values and scales are read once, at 4.4 TB/s.

Beside the kernel: XLA, which widens a copy of the matrix, and XLA with the matrix in bfloat16.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import Case
from dcpjax.bench.kernels_experts import CONTIGUOUS_CEILING, random_stack
from dcpjax.pallas_kernels.projection import project
from dcpjax.quant import LayerOf
from models.stored import FP8

# Rows and columns: shared gate and up are as q_a.
MATRICES = {
    "q_a": (2048, 6144),
    "q_b": (16384, 2048),
    "o": (6144, 16384),
    "dense gate": (12288, 6144),
    "dense down": (6144, 12288),
    "shared down": (6144, 2048),
}
TOKENS = (1, 16, 64)
# Of a stack: more than the device's cache, less than 2 GiB.
STACK_BYTES = 800_000_000


def cases(
    tokens: tuple[int, ...] = TOKENS,
    arms: tuple[str, ...] = ("triton", "xla", "bf16"),
    matrices: Mapping[str, tuple[int, int]] = MappingProxyType(MATRICES),
    stack_bytes: int = STACK_BYTES,
) -> list[Case]:
    """One for every matrix, number of tokens and arm."""
    return [
        _case(name, matrices[name], stack_bytes, count, arm) for name in matrices for count in tokens for arm in arms
    ]


def _case(name: str, matrix: tuple[int, int], stack_bytes: int, tokens: int, arm: str) -> Case:
    (out, into), form = matrix, None if arm == "bf16" else FP8
    layers = max(2, stack_bytes // (out * into))

    def call(number, x, stack):
        layer = number % layers
        w = stack[layer] if form is None else LayerOf(stack, layer)
        return project(x, w, backend="triton" if arm == "triton" else "xla")

    def inputs():
        x = jax.random.normal(jax.random.key(9), (tokens, into), jnp.bfloat16)
        return x, random_stack(form, (layers,), jax.random.key(0), matrix)

    scales = -(-out // FP8.block[0]) * -(-into // FP8.block[1]) * FP8.scales.itemsize
    nbytes = out * into * 2 if form is None else out * into + scales
    nbytes += tokens * (out + into) * 2
    shape = {"matrix": name, "tokens": tokens}
    return Case("projection", arm, shape, call, inputs, nbytes, nbytes / CONTIGUOUS_CEILING * 1e6, 40)
