"""The routed experts of a step: SwiGLU of each token through its own experts, weighted and summed.

With few tokens the time is that of reading the weights of the experts that were chosen. XLA reference, and the choice of
the kernel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels.experts_triton import ExpertsConfig, experts_triton, readable, weighted_sum
from dcpjax.quant import QArray, plain


def fitting(backend: str, gate: jax.Array | QArray, up: jax.Array | QArray, down: jax.Array | QArray) -> str:
    """The backend that serves these stacks `[…, out, in]`, plain ones of any dtype or quantised: "triton" only where it has
    their widths and can read them, else "xla". Others stay what they are."""
    if backend != "triton":
        return backend
    whole = all(size % 16 == 0 for size in down.shape[-2:])
    return "triton" if whole and readable(gate, up, down) else "xla"


def experts_ffn(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    *, layer: jax.Array | int | None = None, config: ExpertsConfig | None = None, backend: str = "xla",
) -> jax.Array:  # fmt: skip
    """`Σ_j weight[t, j] · down_e (silu(gate_e x_t) * (up_e x_t))`, e = `experts[t, j]`: `[T, D]` in x's dtype.

    `x [T, D]`; `experts [T, k]` int32, different ones in a row, −1 for one that is left out; `weight [T, k]` float32;
    stacks `gate`, `up [E, I, D]`, `down [E, D, I]`, plain or quantised, or with a `layer` those of all layers, `[N, …]`.
    `backend` is "xla" or "triton" ("interpret" for tests). Raises
    `NotImplementedError` where the kernel does not serve these shapes.
    """
    stacks = gate, up, down
    if backend in ("triton", "interpret"):
        if layer is None:
            layer, stacks = 0, jax.tree.map(lambda a: a[None], stacks)
        return experts_triton(x, experts, weight, *stacks, layer, config, backend == "interpret")
    if layer is not None:
        stacks = jax.tree.map(lambda a: a[layer], stacks)
    # A copy of one layer's experts is made where they are quantised.
    return experts_grouped(x, experts, weight, *plain(stacks, x.dtype), _ragged)


def experts_grouped(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    product: Callable,
) -> jax.Array:  # fmt: skip
    """`experts_ffn` of plain stacks of one layer by a grouped `product(rows [P, in], stack [E, out, in], sizes [E] int32)` →
    `[P, out]`, rows sorted by expert and those of no expert last."""
    tokens, per_token = experts.shape
    # What is left out comes last, in no group.
    flat = jnp.where(experts < 0, gate.shape[0], experts).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)
    rows = x[order // per_token]
    hidden = jax.nn.silu(product(rows, gate, sizes)) * product(rows, up, sizes)
    # Back in the order of the pairs, for a sum in the same order each time.
    out = product(hidden, down, sizes)[jnp.argsort(order)].reshape(tokens, per_token, -1)
    return weighted_sum(out, experts, weight).astype(x.dtype)


def _ragged(rows, stack, sizes):
    return jax.lax.ragged_dot(
        rows,
        stack.swapaxes(1, 2).astype(rows.dtype),
        sizes,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=rows.dtype,
    )
