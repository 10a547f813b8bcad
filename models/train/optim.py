"""The optimiser: orthogonalised momentum for matrices, Adam for the rest, and the router's balancing rule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.params import Weight, is_weight

# Peak learning rates. An orthogonalised update is scaled to entries of 0.2 · rate, Adam's has entries of its rate.
MATRIX_RATE, VECTOR_RATE, DECAY = 5e-3, 3e-3, 0.1
_BALANCE = 1e-3


def _is_matrix(w: Weight) -> bool:
    looked_up = ("embed_tokens", "lm_head", "mlp.gate.weight")
    return len(w.size) >= 2 and not any(name in w.name for name in looked_up)


def orthogonalise(m: jax.Array) -> jax.Array:
    """Nearest semi-orthogonal matrices to `m [..., r, c]` (five quintic Newton–Schulz steps), times 0.2·√max(r, c);
    float32.

    Source: Jordan et al., Muon (2024), with the scale of Liu et al. (2025).
    """
    rows, columns = m.shape[-2:]
    x = m.astype(jnp.bfloat16)
    x = jnp.swapaxes(x, -1, -2) if rows > columns else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), (-1, -2), keepdims=True))
    x = (x / (norm + 1e-7)).astype(jnp.bfloat16)

    def step(_, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        return 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x

    # a loop, because the compiler would otherwise see five times as much for every leaf
    x = jax.lax.fori_loop(0, 5, step, x)
    x = jnp.swapaxes(x, -1, -2) if rows > columns else x
    return x.astype(jnp.float32) * 0.2 * max(rows, columns) ** 0.5


def _muon() -> optax.GradientTransformation:
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, momentum, params=None):
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, momentum, grads)
        return jax.tree.map(lambda m, g: orthogonalise(0.95 * m + g), momentum, grads), momentum

    return optax.GradientTransformation(init, update)


def optimiser(declared: Any) -> optax.GradientTransformation:
    """For a tree that looks like `declared` (of `Weight`). Its rates are peaks: updates are scaled by the schedule."""
    labels = jax.tree.map(lambda w: "matrix" if _is_matrix(w) else "vector", declared, is_leaf=is_weight)
    decayed = jax.tree.map(lambda w: len(w.size) >= 2, declared, is_leaf=is_weight)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"matrix": _muon(), "vector": optax.scale_by_adam(0.9, 0.95)}, labels),
        optax.add_decayed_weights(DECAY, decayed),
        optax.partition({"matrix": optax.scale(-MATRIX_RATE), "vector": optax.scale(-VECTOR_RATE)}, labels),
    )


def balance(layers: Any, load: jax.Array, scale: jax.Array) -> Any:
    """Raises the bias of experts that were chosen less than their share, by `load [n, E]` float32, lowers the others'.
    Source: Wang et al., auxiliary-loss-free load balancing (2024)."""
    step = _BALANCE * scale * jnp.sign(1 / load.shape[-1] - load)
    return layers.replace(moe=layers.moe.replace(router_bias=layers.moe.router_bias + step))
