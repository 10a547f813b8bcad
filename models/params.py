"""Every weight of the network, declared once: shape, logical axes, start value and public tensor name.

The tree is plain `flax.struct` pytrees whose leaves are stacked over the layers that have them
(`params.layers.attention.q_b [N, out, in]`), so the real model is a few dozen leaves. Matrices keep the checkpoint's
`[out, in]` orientation. Shapes are padded for the device count of the mesh; padding is zero and never saved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dcpjax.mesh import MeshPlan
from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """Declaration of one leaf. A `{i}` or `{e}` in `name` stands for the layer or the expert.

    `size` is the unpadded shape of one layer's (and expert's) matrix, `shape` the padded one; likewise `experts` are
    those of the checkpoint and `places` the padded length of their stack. On disk it is the part `take` of axis 1 of
    the tensor reshaped to `view` (both None: the tensor as it is).
    """

    name: str
    size: tuple[int, ...]
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()
    experts: int = 0
    places: int = 0
    start: str = "fan_in"
    float32: bool = False
    view: tuple[int, ...] | None = None
    take: tuple[int, int] | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading dimensions without padding: layers, then experts."""
        return self._lead(self.experts)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of the leaf in memory: stack, then matrix, padded."""
        return self._lead(self.places) + self.shape

    @property
    def full_axes(self) -> tuple[str | None, ...]:
        """Logical axes of `full_shape`."""
        return ((None,) if self.layers else ()) + (("experts",) if self.experts else ()) + self.axes

    def _lead(self, experts: int) -> tuple[int, ...]:
        return ((len(self.layers),) if self.layers else ()) + ((experts,) if experts else ())


@struct.dataclass
class Attention:
    """MLA of N layers; `kv_b` of the checkpoint is kept as its key half and its value half, per head."""

    input_norm: Any  # [N, D]
    q_a: Any  # [N, q_rank, D]
    q_norm: Any  # [N, q_rank]
    q_b: Any  # [N, H·(nope+rope), q_rank]
    kv_a: Any  # [N, kv_rank+rope, D]
    kv_norm: Any  # [N, kv_rank]
    k_b: Any  # [N, H, nope, kv_rank]
    v_b: Any  # [N, H, v, kv_rank]
    o: Any  # [N, D, H·v]
    post_norm: Any  # [N, D], before the feed-forward part


@struct.dataclass
class Indexer:
    """DSA indexer of the X full layers."""

    q_b: Any  # [X, heads·dim, q_rank]
    k: Any  # [X, dim, D]
    k_norm: Any  # [X, dim]
    k_bias: Any  # [X, dim]
    head_weight: Any  # [X, heads, D]


@struct.dataclass
class Dense:
    """SwiGLU of the dense layers."""

    gate: Any  # [n, F, D]
    up: Any  # [n, F, D]
    down: Any  # [n, D, F]


@struct.dataclass
class Moe:
    """Router, routed experts and the shared expert of the sparse layers."""

    router: Any  # [n, E, D]
    router_bias: Any  # [n, E] float32, used to choose only
    gate: Any  # [n, E, I, D]
    up: Any  # [n, E, I, D]
    down: Any  # [n, E, D, I]
    shared_gate: Any  # [n, S, D]
    shared_up: Any  # [n, S, D]
    shared_down: Any  # [n, D, S]


@struct.dataclass
class Layers:
    """Stacks over a run of decoder layers; `dense` or `moe` is None where no layer has it."""

    attention: Attention
    indexer: Indexer
    dense: Dense | None
    moe: Moe | None


@struct.dataclass
class Mtp:
    """The draft: two norms and a projection around one decoder layer of its own."""

    token_norm: Any  # [D] "enorm"
    hidden_norm: Any  # [D] "hnorm"
    join: Any  # [D, 2·D] "eh_proj", embedding half first
    layers: Layers  # stacks of one
    out_norm: Any  # [D] "shared_head.norm"


@struct.dataclass
class Params:
    """All weights. `embed` and `head` serve the draft too."""

    embed: Any  # [V, D]
    layers: Layers
    norm: Any  # [D]
    head: Any  # [V, D]
    mtp: Mtp | None


def declare(cfg: ModelConfig, pad: Callable[..., int] = lambda n, axis="width": n) -> Params:
    """The tree of `Weight` declarations; `pad(size, axis)` rounds a sharded size up (`MeshPlan.pad`)."""
    d, v = cfg.hidden_size, cfg.vocab_size
    return Params(
        embed=Weight("model.embed_tokens.weight", (v, d), ("vocab", None), (pad(v), d), start="normal"),
        layers=_layers(cfg, pad, tuple(enumerate(cfg.layers))),
        norm=Weight("model.norm.weight", (d,), (None,), (d,), start="one"),
        head=Weight("lm_head.weight", (v, d), ("vocab", None), (pad(v), d)),
        mtp=_mtp(cfg, pad) if cfg.has_mtp else None,
    )


def _mtp(cfg: ModelConfig, pad: Callable[..., int]) -> Mtp:
    d, at, prefix = cfg.hidden_size, cfg.num_layers, f"model.layers.{cfg.num_layers}"
    kind = dataclasses.replace(cfg.layers[0], full=True, sparse=True)
    return Mtp(
        token_norm=Weight(f"{prefix}.enorm.weight", (d,), (None,), (d,), start="one"),
        hidden_norm=Weight(f"{prefix}.hnorm.weight", (d,), (None,), (d,), start="one"),
        join=Weight(f"{prefix}.eh_proj.weight", (d, 2 * d), (None, None), (d, 2 * d)),
        layers=_layers(cfg, pad, ((at, kind),)),
        out_norm=Weight(f"{prefix}.shared_head.norm.weight", (d,), (None,), (d,), start="one"),
    )


def _layers(cfg: ModelConfig, pad: Callable[..., int], layers: tuple) -> Layers:
    at = tuple(i for i, _ in layers)
    full = tuple(i for i, kind in layers if kind.full)
    dense = tuple(i for i, kind in layers if not kind.sparse)
    sparse = tuple(i for i, kind in layers if kind.sparse)
    return Layers(
        attention=_attention(cfg, pad, at),
        indexer=_indexer(cfg, full),
        dense=_dense(cfg, pad, dense) if dense else None,
        moe=_moe(cfg, pad, sparse) if sparse else None,
    )


def _attention(cfg: ModelConfig, pad: Callable[..., int], at: tuple[int, ...]) -> Attention:
    d, h, hp = cfg.hidden_size, cfg.num_heads, pad(cfg.num_heads)
    nope, v, kv = cfg.nope_dim, cfg.v_dim, cfg.kv_rank

    def w(name, size, axes=(None, None), shape=None, **more):
        return Weight(f"model.layers.{{i}}.{name}", size, axes, shape or size, layers=at, **more)

    def half(size, start):
        return w(
            "self_attn.kv_b_proj.weight",
            (h, size, kv),
            ("heads", None, None),
            (hp, size, kv),
            view=(h, nope + v, kv),
            take=(start, start + size),
        )

    return Attention(
        input_norm=w("input_layernorm.weight", (d,), (None,), start="one"),
        q_a=w("self_attn.q_a_proj.weight", (cfg.q_rank, d)),
        q_norm=w("self_attn.q_a_layernorm.weight", (cfg.q_rank,), (None,), start="one"),
        q_b=w(
            "self_attn.q_b_proj.weight",
            (h * cfg.qk_dim, cfg.q_rank),
            ("heads", None),
            (hp * cfg.qk_dim, cfg.q_rank),
        ),
        kv_a=w("self_attn.kv_a_proj_with_mqa.weight", (cfg.latent_width, d)),
        kv_norm=w("self_attn.kv_a_layernorm.weight", (kv,), (None,), start="one"),
        k_b=half(nope, 0),
        v_b=half(v, nope),
        o=w("self_attn.o_proj.weight", (d, h * v), (None, "heads"), (d, hp * v)),
        post_norm=w("post_attention_layernorm.weight", (d,), (None,), start="one"),
    )


def _indexer(cfg: ModelConfig, at: tuple[int, ...]) -> Indexer:
    d, ix = cfg.hidden_size, cfg.indexer

    def w(name, size, axes=(None, None), **more):
        return Weight(f"model.layers.{{i}}.self_attn.indexer.{name}", size, axes, size, layers=at, **more)

    return Indexer(
        q_b=w("wq_b.weight", (ix.num_heads * ix.head_dim, cfg.q_rank)),
        k=w("wk.weight", (ix.head_dim, d)),
        k_norm=w("k_norm.weight", (ix.head_dim,), (None,), start="one"),
        k_bias=w("k_norm.bias", (ix.head_dim,), (None,), start="zero"),
        head_weight=w("weights_proj.weight", (ix.num_heads, d)),
    )


def _gated(make: Callable, prefix: str, d: int, width: int, pad: Callable[..., int], axis: str = "width") -> tuple:
    """Gate, up and down of one SwiGLU; `axis` is that of its width."""
    into = {"size": (width, d), "axes": (axis, None), "shape": (pad(width, axis), d)}
    out = {"size": (d, width), "axes": (None, axis), "shape": (d, pad(width, axis))}
    return (
        make(f"{prefix}.gate_proj.weight", **into),
        make(f"{prefix}.up_proj.weight", **into),
        make(f"{prefix}.down_proj.weight", **out),
    )


def _dense(cfg: ModelConfig, pad: Callable[..., int], at: tuple[int, ...]) -> Dense:
    def w(name, **more):
        return Weight(f"model.layers.{{i}}.{name}", layers=at, **more)

    return Dense(*_gated(w, "mlp", cfg.hidden_size, cfg.dense_width, pad))


def _moe(cfg: ModelConfig, pad: Callable[..., int], at: tuple[int, ...]) -> Moe:
    d, moe = cfg.hidden_size, cfg.moe

    def w(name, **more):
        return Weight(f"model.layers.{{i}}.{name}", layers=at, **more)

    e = moe.num_experts

    def of_experts(name, **more):
        return w(name, experts=e, places=pad(e, "experts"), **more)

    gate, up, down = _gated(of_experts, "mlp.experts.{e}", d, moe.width, pad, "expert_width")
    return Moe(
        w("mlp.gate.weight", size=(e, d), axes=(None, None), shape=(e, d)),
        w(
            "mlp.gate.e_score_correction_bias",
            size=(e,),
            axes=(None,),
            shape=(e,),
            start="zero",
            float32=True,
        ),
        gate,
        up,
        down,
        *_gated(w, "mlp.shared_experts", d, moe.shared_width, pad),
    )


def is_weight(x: Any) -> bool:
    """Whether `x` is a declared weight: where walks through a declaration stop."""
    return isinstance(x, Weight)


def map_weights(f: Callable[[Weight], Any], tree: Any) -> Any:
    """Applies `f` to every declaration of a tree."""
    return jax.tree.map(f, tree, is_leaf=is_weight)


def init(cfg: ModelConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Params:
    """Random unpadded parameters `[…]` in `dtype`: matrices N(0, 1/fan_in), norms 1, biases 0, embeddings N(0, 1)."""
    weights, tree = jax.tree.flatten(declare(cfg), is_leaf=is_weight)
    keys = jax.random.split(key, len(weights))

    def draw(w: Weight, key: jax.Array) -> jax.Array:
        kind = jnp.float32 if w.float32 else dtype
        if w.start in ("one", "zero"):
            return jnp.full(w.full_shape, float(w.start == "one"), kind)
        scale = 1.0 if w.start == "normal" else w.size[-1] ** -0.5
        return (scale * jax.random.normal(key, w.full_shape, jnp.float32)).astype(kind)

    return tree.unflatten([draw(w, k) for w, k in zip(weights, keys)])


def pad_to(params: Params, cfg: ModelConfig, plan: MeshPlan) -> Params:
    """Pads unpadded parameters with zeros and lays them on the mesh."""

    def place(w: Weight, x: jax.Array) -> jax.Array:
        widths = [(0, p - s) for p, s in zip(w.full_shape, w.stack + w.size, strict=True)]
        return jax.device_put(jnp.pad(x, widths), plan.sharding(*w.full_axes))

    return jax.tree.map(place, declare(cfg, plan.pad), params, is_leaf=is_weight)
