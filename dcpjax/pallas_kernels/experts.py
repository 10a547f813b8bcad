"""The routed experts of a step: SwiGLU of each token through its own experts, weighted and summed.

With few tokens the time is that of reading the weights of the experts that were chosen. XLA reference, and the choice of
the kernel.
"""

import jax
import jax.numpy as jnp

from dcpjax.pallas_kernels.experts_triton import ExpertsConfig, experts_triton, readable, weighted_sum
from dcpjax.quant import QArray, plain

# Of a step; more are not measured, and the grouped product is made for them. Quantised experts are copied for it.
MOST_TOKENS = 2048

# Blocks of JAX's grouped product for Hopper: columns of the result, and depth of a step along the sum.
_COLUMNS, _DEPTH = 128, 64


def fitting(
    backend: str, x: jax.Array, gate: jax.Array | QArray, up: jax.Array | QArray, down: jax.Array | QArray
) -> str:
    """The backend that serves tokens `x [T, D]` and these stacks, plain ones of any dtype or quantised.

    "triton" is meant up to `MOST_TOKENS`, and "mosaic" above and where the triton kernel has not these widths; "xla" is
    what is left. Others stay what they are.
    """
    (tokens, width), inner, dtype = x.shape, gate.shape[-2], x.dtype
    if backend not in ("triton", "mosaic"):
        return backend
    fits = tokens <= MOST_TOKENS and width % 16 == 0 and inner % 16 == 0
    if backend == "triton" and fits and readable(gate, up, down):
        return "triton"
    # Both products' results are whole blocks; so are then the sums.
    whole = width % _COLUMNS == 0 and inner % _COLUMNS == 0
    return "mosaic" if whole and dtype == jnp.bfloat16 else "xla"


def experts_ffn(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    *, layer: jax.Array | int | None = None, config: ExpertsConfig | None = None, backend: str = "xla",
) -> jax.Array:  # fmt: skip
    """`Σ_j weight[t, j] · down_e (silu(gate_e x_t) * (up_e x_t))`, e = `experts[t, j]`: `[T, D]` in x's dtype.

    `x [T, D]`; `experts [T, k]` int32, different ones in a row, −1 for one that is left out; `weight [T, k]` float32;
    stacks `gate`, `up [E, I, D]`, `down [E, D, I]`, plain or quantised, or with a `layer` those of all layers, `[N, …]`.
    `backend` is "xla", "triton" ("interpret" for tests) or "mosaic". Raises
    `NotImplementedError` where the kernel does not serve these shapes.
    """
    stacks = gate, up, down
    if backend in ("triton", "interpret"):
        if layer is None:
            layer, stacks = 0, jax.tree.map(lambda a: a[None], stacks)
        return experts_triton(x, experts, weight, *stacks, layer, config, backend == "interpret")
    if layer is not None:
        stacks = jax.tree.map(lambda a: a[layer], stacks)
    # No other reads quantised stacks: a copy of one layer's experts is made.
    stacks = plain(stacks, x.dtype)
    return _experts_ragged(x, experts, weight, *stacks, _mosaic if backend == "mosaic" else _ragged)


def _experts_ragged(x, experts, weight, gate, up, down, product):
    """Tokens sorted by expert, and one grouped `product(rows, stack, sizes)` for each matrix."""
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


def _mosaic(rows, stack, sizes):
    """JAX's own grouped product for Hopper."""
    _, out, into = stack.shape
    if out % _COLUMNS or into % _DEPTH or rows.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the grouped product takes bfloat16 stacks of whole {_COLUMNS} × {_DEPTH} blocks, not {stack.shape} {rows.dtype}; "
            "use backend xla"
        )
    # Not before it is needed: it brings JAX's own test tools along.
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return ragged_dot_mgpu.ragged_dot(
        rows,
        stack,
        group_sizes=sizes,
        block_m=64,
        block_n=_COLUMNS,
        block_k=_DEPTH,
        max_concurrent_steps=6,
        grid_block_n=1,
        transpose_rhs=True,
    )
