"""Feed-forward parts sharded over the whole mesh: SwiGLU by its width, routed experts by their width or by expert.

Each runs in one `shard_map` and ends in at most one sum over devices. All devices hold all tokens of a step, so with whole
experts on a device each (expert parallel) no token is sent anywhere: a device computes the experts it has, and the sum that
ends the layer anyway adds up the rest.
"""

import jax
import jax.numpy as jnp

from dcpjax import collectives
from dcpjax.mesh import MeshPlan
from dcpjax.pallas_kernels.experts import experts_ffn, fitting
from dcpjax.projections import on_device
from dcpjax.quant import einsum, specs


def embed(table: jax.Array, tokens: jax.Array, plan: MeshPlan) -> jax.Array:
    """Rows `[T, D]` of the vocabulary-sharded `table [V, D]`, in its dtype, for ids `tokens [T]` int32; ids outside the
    vocabulary give zeros."""

    def body(table, tokens):
        local = tokens - collectives.device_index() * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0)
        return collectives.sum_devices(rows)

    return plan.per_device(body, (plan.spec("vocab", None), plan.spec()), plan.spec())(table, tokens)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, backend: str = "xla") -> jax.Array:
    """`down · (silu(gate · x) * (up · x))` of `x [T, D]`, in its dtype; weights `[F, D]`, `[F, D]`, `[D, F]`. `backend`: of
    `project`, where it serves them.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    hidden = jax.nn.silu(on_device(x, gate, backend)) * on_device(x, up, backend)
    return on_device(hidden, down, backend)


def dense_ffn(
    x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, plan: MeshPlan, backend: str = "xla"
) -> jax.Array:
    """`swiglu` of `x [T, D]`, in its dtype, with its width over the mesh."""
    into, out, whole = plan.spec("width", None), plan.spec(None, "width"), plan.spec()

    def body(x, gate, up, down):
        return collectives.sum_devices(swiglu(x, gate, up, down, backend))

    parts = specs(gate, into), specs(up, into), specs(down, out)
    return plan.per_device(body, (whole, *parts), whole)(x, gate, up, down)


def route(
    x: jax.Array, router: jax.Array, bias: jax.Array, *, per_token: int, num_groups: int, groups_per_token: int,
    norm_topk: bool, scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Experts `[T, per_token]` int32 and their weights `[T, per_token]` float32 of tokens `x [T, D]`.

    Sigmoid scores; the bias and the groups choose, the unbiased scores weigh (DeepSeek-V3, section 2.1.2).
    """
    score = jax.nn.sigmoid(einsum("td,ed->te", x.astype(jnp.float32), router))
    choice = score + bias
    if num_groups > 1:
        grouped = choice.reshape(choice.shape[0], num_groups, -1)
        best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        _, kept = jax.lax.top_k(best_two, groups_per_token)
        keep = jnp.zeros(best_two.shape, bool).at[jnp.arange(len(choice))[:, None], kept].set(True)
        choice = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = jax.lax.top_k(choice, per_token)
    weight = jnp.take_along_axis(score, experts, axis=1)
    if norm_topk:
        weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    return experts, weight * scale


def experts_everywhere(x, experts, weight, gate, up, down):
    """`experts_ffn` by every expert on every token, with its shapes and dtypes: the least code, and right for a few
    small experts (CPU)."""
    share = jnp.zeros((x.shape[0], gate.shape[0]), jnp.float32)
    share = share.at[jnp.arange(x.shape[0])[:, None], jnp.where(experts < 0, gate.shape[0], experts)].add(
        weight, mode="drop"
    )
    hidden = jax.nn.silu(einsum("td,eid->tei", x, gate)) * einsum("td,eid->tei", x, up)
    return einsum("tei,edi->td", hidden * share[..., None].astype(x.dtype), down)


def own_experts(experts: jax.Array, num_own: int) -> jax.Array:
    """Numbers `[T, k]` int32, among the `num_own` on this device, of `experts [T, k]` int32; −1 for those elsewhere."""
    local = experts - collectives.device_index() * num_own
    return jnp.where((local >= 0) & (local < num_own), local, -1)


def moe_ffn(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    shared_gate: jax.Array, shared_up: jax.Array, shared_down: jax.Array, plan: MeshPlan, backend: str = "xla",
    layer: jax.Array | int = 0, dense: str = "xla",
) -> jax.Array:  # fmt: skip
    """Routed experts plus the shared one on `x [T, D]`, in its dtype; `experts [T, k]` int32 with `weight [T, k]`
    float32; stacks of the experts of N layers, `[N, E, I, D]`, `[N, E, I, D]`, `[N, E, D, I]`, plain or quantised, where E
    may be padded and `layer` is the one to use. The shared expert's are that layer's.

    `backend`: of `experts_ffn`, where its kernel has the widths and reads the stacks; `dense`: of `project`, for the shared one.
    """

    def body(layer, x, experts, weight, gate, up, down, *shared):
        if plan.expert_parallel:
            experts = own_experts(experts, gate.shape[1])
        if backend == "xla" and plan.platform == "cpu":
            routed = experts_everywhere(x, experts, weight, *jax.tree.map(lambda a: a[layer], (gate, up, down)))
        else:
            chosen = fitting(backend, gate, up, down)
            routed = experts_ffn(x, experts, weight, gate, up, down, layer=layer, backend=chosen)
        return collectives.sum_devices(routed + swiglu(x, *shared, dense))

    into, out, whole = plan.spec("width", None), plan.spec(None, "width"), plan.spec()
    stack_into = plan.spec(None, "experts", "expert_width", None)
    stack_out = plan.spec(None, "experts", None, "expert_width")
    weights = gate, up, down, shared_gate, shared_up, shared_down
    parts = map(specs, weights, (stack_into, stack_into, stack_out, into, into, out))
    ins = (jnp.asarray(layer, jnp.int32), x, experts, weight, *weights)
    return plan.per_device(body, (whole, whole, whole, whole, *parts), whole)(*ins)
