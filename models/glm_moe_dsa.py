"""GLM-5.2: decoder layers of sparse MLA and experts over a paged cache, target and draft alike.

A *block* is a full layer, which selects slots with its indexer, and the layers after it that reuse its selection. Equal
blocks are scanned with the caches carried: a cache passed as scan input or output would be copied every step.
The draft layer runs through the same `decoder_layer` on its own weights and pools (see `mtp.py`).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax import attention, moe
from dcpjax.attention import AttentionOptions, Selection
from dcpjax.batch import ForwardBatch
from dcpjax.cache import PagedCache
from dcpjax.mesh import MeshPlan
from dcpjax.projections import projected
from dcpjax.quant import LayerOf, QArray, einsum, layer_of, linear
from models.config import LayerKind, ModelConfig
from models.layers import layer_norm, rms_norm, rope
from models.params import Attention, Layers, Params


@dataclasses.dataclass(frozen=True)
class Network:
    """What a forward pass needs besides arrays. Static."""

    cfg: ModelConfig
    plan: MeshPlan
    options: AttentionOptions = AttentionOptions()


@struct.dataclass
class Captured:
    """Activations of a traced forward: states `[N + 1, T, D]` in the network's dtype (embeddings, then after each
    layer), selected slots `[X, T, K]` int32 of the full layers."""

    states: jax.Array
    slots: jax.Array


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer's weights and cache rows lie: ordinals (int32 scalars) among all, full, dense and sparse layers."""

    layer: jax.Array | int
    full: jax.Array | int
    dense: jax.Array | int
    sparse: jax.Array | int


def forward(
    params: Params, cache: PagedCache, batch: ForwardBatch, net: Network, capture: bool = False
) -> tuple[jax.Array, PagedCache, Captured | None]:
    """Runs the target on one step's tokens.

    Returns the hidden states after the final norm `[T, D]`, in the embedding's dtype, the cache with the written rows,
    and what was captured.
    """
    h = net.plan.constrain(moe.embed(params.embed, batch.tokens, net.plan))
    states, slots = [h[None]], []
    start = Place(0, 0, 0, 0)
    for kinds, repeats in net.cfg.blocks:
        step = functools.partial(_block, params.layers, kinds, start, batch, net, capture)
        if repeats == 1:
            (h, cache), seen = step((h, cache), 0)
            seen = jax.tree.map(lambda x: x[None], seen)
        else:
            (h, cache), seen = jax.lax.scan(step, (h, cache), jnp.arange(repeats))
        if capture:
            states.append(seen[0].reshape(-1, *h.shape))
            slots.append(seen[1])
        start = _advance(start, kinds, repeats)
    hidden = rms_norm(h, params.norm, net.cfg.norm_eps)
    return hidden, cache, Captured(jnp.concatenate(states), jnp.concatenate(slots)) if capture else None


def with_boxes(batch: ForwardBatch, params: Params, cache: PagedCache, net: Network) -> ForwardBatch:
    """The batch of a step of this model, and of its drafts, with what attention sends parts through, if anything."""
    heads, dtype = net.plan.pad(net.cfg.num_heads, "heads"), params.embed.dtype
    return attention.with_boxes(batch, heads, net.cfg.kv_rank, dtype, cache.latent, net.options, net.plan)


def _advance(place: Place, kinds: tuple[LayerKind, ...], repeats: jax.Array | int) -> Place:
    sparse = sum(kind.sparse for kind in kinds)
    return Place(
        layer=place.layer + repeats * len(kinds),
        full=place.full + repeats * sum(kind.full for kind in kinds),
        dense=place.dense + repeats * (len(kinds) - sparse),
        sparse=place.sparse + repeats * sparse,
    )


def _block(layers, kinds, start, batch, net, capture, carry, repeat):
    """One block: its full layer selects, all its layers attend to that selection."""
    h, cache = carry
    place, selection, states = _advance(start, kinds, repeat), None, []
    for kind in kinds:
        h, cache, selection = decoder_layer(layers, kind, place, h, cache, batch, selection, net)
        place = _advance(place, (kind,), 1)
        states.append(h)
    return (h, cache), (jnp.stack(states), selection.slots) if capture else None


def decoder_layer(
    layers: Layers, kind: LayerKind, place: Place, h: jax.Array, cache: PagedCache, batch: ForwardBatch,
    selection: Selection | None, net: Network,
) -> tuple[jax.Array, PagedCache, Selection]:  # fmt: skip
    """One layer on `h [T, D]`, in its dtype: writes its rows, then reads keys from the cache alone.

    A full layer makes its own selection unless one is given (frozen draft iterations: then no index key is written).
    """
    cfg, plan = net.cfg, net.plan
    w = layer_of(layers.attention, place.layer)
    a, q_low, q = queries(w, h, batch.positions, net)
    with jax.named_scope("project"):
        kv = project(a, w.kv_a, net)
        latent = rms_norm(kv[:, : cfg.kv_rank], w.kv_norm, cfg.latent_norm_eps)
        key = rope(kv[:, cfg.kv_rank :], batch.positions, cfg.rope_theta)
        row = plan.constrain(jnp.concatenate([latent, key], axis=-1))
    cache = cache.replace(latent=cache.latent.write(place.layer, row, batch.write_slots, plan))
    if kind.full and selection is None:
        cache, selection = _select(layers, place.full, a, q_low, cache, batch, net)
    with jax.named_scope("attention"):
        out = attention.attend(
            q, cache.latent, place.layer, selection, batch, cfg.kv_rank, cfg.softmax_scale, net.options, plan
        )
    with jax.named_scope("output"):
        value = attention.heads_sharded(einsum("thl,hvl->thv", out, w.v_b), plan)
        h = h + plan.constrain(project(value.reshape(len(h), -1), w.o, net, into="heads"))
    with jax.named_scope("ffn"):
        h = h + plan.constrain(_ffn(layers, kind, place, rms_norm(h, w.post_norm, cfg.norm_eps), net))
    return h, cache, selection


def project(
    x: jax.Array, w: jax.Array | QArray | LayerOf, net: Network, out: str | None = None, into: str | None = None
) -> jax.Array:
    """`x [T, in]` times `w [out, in]` → `[T, out]`, in x's dtype; `out` and `into` are the matrix's logical axes."""
    return projected(x, w, net.plan, net.options.kernels.projections, out, into)


def queries(w: Attention, h: jax.Array, positions: jax.Array, net: Network) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`h [T, D]` after its norm `[T, D]`, the low-rank query `[T, q_rank]`, and absorbed queries `[T, H, W]`, heads
    sharded.

    All in h's dtype. `w`: one layer's weights. W is the width of a latent row: the scores are products with rows as
    they lie in the cache.
    """
    cfg = net.cfg
    a = rms_norm(h, w.input_norm, cfg.norm_eps)
    with jax.named_scope("project"):
        q_low = rms_norm(project(a, w.q_a, net), w.q_norm, cfg.latent_norm_eps)
        q = project(q_low, w.q_b, net, out="heads").reshape(len(h), -1, cfg.qk_dim)
        q_rope = rope(q[..., cfg.nope_dim :], positions, cfg.rope_theta)
        q = jnp.concatenate([einsum("thn,hnl->thl", q[..., : cfg.nope_dim], w.k_b), q_rope], axis=-1)
    return a, q_low, attention.heads_sharded(q, net.plan)


def _select(layers, at, a, q_low, cache, batch, net):
    """Writes this layer's index keys and chooses the slots each token attends to."""
    cfg, ix, plan = net.cfg, net.cfg.indexer, net.plan
    w = layer_of(layers.indexer, at)
    with jax.named_scope("index"):
        q = project(q_low, w.q_b, net).reshape(len(a), ix.num_heads, ix.head_dim)
        q = _rope_first(q, batch.positions, cfg)
        k = _rope_first(layer_norm(project(a, w.k, net), w.k_norm, w.k_bias, ix.norm_eps), batch.positions, cfg)
        weight = linear(a.astype(jnp.float32), w.head_weight) * (ix.num_heads * ix.head_dim) ** -0.5
        q, k, weight = plan.constrain(q), plan.constrain(k), plan.constrain(weight)
    cache = cache.replace(index=cache.index.write(at, k, batch.write_slots, plan))
    with jax.named_scope("attention"):
        chosen = attention.select(
            q, weight, cache.index, at, cache.latent, batch, ix.topk, cache.first_slot, plan, net.options.kernels
        )
    return cache, chosen


def _rope_first(x: jax.Array, positions: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The indexer rotates the first `rope_dim` values; the query of the main attention rotates its last."""
    return jnp.concatenate([rope(x[..., : cfg.rope_dim], positions, cfg.rope_theta), x[..., cfg.rope_dim :]], axis=-1)


def _ffn(layers: Layers, kind: LayerKind, place: Place, x: jax.Array, net: Network) -> jax.Array:
    kernels = net.options.kernels
    if not kind.sparse:
        w = layer_of(layers.dense, place.dense)
        return moe.dense_ffn(x, w.gate, w.up, w.down, net.plan, kernels.projections)
    # The experts stay in their stacks: kernels read what they need from there.
    stacks, m = (layers.moe.gate, layers.moe.up, layers.moe.down), net.cfg.moe
    rest = layers.moe.replace(gate=None, up=None, down=None)
    w = layer_of(rest, place.sparse)
    experts, weight = moe.route(
        x,
        w.router,
        w.router_bias,
        per_token=m.experts_per_token,
        num_groups=m.num_groups,
        groups_per_token=m.groups_per_token,
        norm_topk=m.norm_topk,
        scale=m.scale,
    )
    shared = w.shared_gate, w.shared_up, w.shared_down
    chosen = kernels.experts, place.sparse, kernels.projections
    return moe.moe_ffn(x, experts, weight, *stacks, *shared, net.plan, *chosen)


def logits(params: Params, hidden: jax.Array, net: Network) -> jax.Array:
    """`[M, V]` float32 of `hidden [M, D]` (after the final norm); V is padded, its surplus entries are zero."""
    out = jnp.einsum(
        "md,vd->mv",
        hidden,
        params.head.astype(hidden.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    # Named twice: asked for the whole at once, the partitioner gathers the matrix instead of the products.
    return net.plan.constrain(net.plan.constrain(out, None, "vocab"))


def full_layer_numbers(cfg: ModelConfig) -> tuple[int, ...]:
    """Layer number of each index pool layer."""
    return tuple(i for i, kind in enumerate(cfg.layers) if kind.full)
