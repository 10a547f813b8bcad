"""The routed experts of a few tokens: SwiGLU of each token through its own experts, weighted and summed.

With few tokens the time is that of reading the weights of the experts that were chosen. XLA reference, and the choice of
the kernel.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

from dcpjax.pallas_kernels.experts_triton import MOST_TOKENS, ExpertsConfig, experts_triton

__all__ = ["MOST_TOKENS", "ExpertsConfig", "experts_ffn", "experts_ragged"]


def experts_ffn(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    *, config: ExpertsConfig | None = None, backend: str = "xla",
) -> jax.Array:  # fmt: skip
    """`Σ_j weight[t, j] · down_e (silu(gate_e x_t) * (up_e x_t))`, e = `experts[t, j]`: `[T, D]` in x's dtype.

    `x [T, D]`; `experts [T, k]` int32, different ones in a row; `weight [T, k]` float32; stacks `gate`, `up [E, I, D]`,
    `down [E, D, I]`. `backend` is "xla", "triton" (at most `MOST_TOKENS` tokens) or "mosaic" (any number). Raises
    `NotImplementedError` where the kernel does not serve these shapes.
    """
    if backend == "triton":
        return experts_triton(x, experts, weight, gate, up, down, config)
    if backend == "mosaic":
        return experts_ragged(x, experts, weight, gate, up, down, _mosaic)
    return experts_ragged(x, experts, weight, gate, up, down, _ragged)


def experts_ragged(x, experts, weight, gate, up, down, product):
    """Tokens sorted by expert, and one grouped `product(rows, stack, sizes)` for each matrix."""
    tokens, per_token = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    rows = x[order // per_token]
    hidden = jax.nn.silu(product(rows, gate, sizes)) * product(rows, up, sizes)
    out = product(hidden, down, sizes) * weight.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros((tokens, x.shape[1]), out.dtype).at[order // per_token].add(out)


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
    if out % 128 or into % 64 or rows.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"the grouped product takes bfloat16 stacks of whole 128 × 64 blocks, not {stack.shape} {rows.dtype}; "
            "use backend xla"
        )
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
