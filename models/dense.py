"""The plain forward pass: no cache, no mesh, one sequence, straight from the equations of the architecture.

It is the oracle of the tests and what training differentiates, so it shares no arithmetic with the serving path. It
takes unpadded `Params`; every result has the parameters' dtype, while norms, softmax, router and index scores are
computed in float32 at least. All functions can be jitted with the configuration static.

Sources: DeepSeek-V2 (MLA), DeepSeek-V3 (experts, MTP), DeepSeek-V3.2 (the indexer).
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from models.config import LayerKind, ModelConfig
from models.params import Dense, Layers, Moe, Mtp, Params


@struct.dataclass
class Margins:
    """How close each position came to another discrete choice; infinite where there was none to make."""

    logits: jax.Array  # [S], the two largest logits
    selection: jax.Array  # [S], last score selected and first one left out, least over the full layers
    experts: jax.Array  # [S], the same for experts and expert groups, least over the sparse layers


@struct.dataclass
class DenseOutput:
    """Everything a layer-by-layer comparison needs."""

    logits: jax.Array  # [S, V]
    hidden_states: jax.Array  # [N+1, S, D]: embeddings, then the residual after each layer
    final_hidden: jax.Array  # [S, D], after the last norm: what the head and the draft read
    latent: jax.Array  # [N, S, kv_rank+rope]: normed latent, rotated key in interleaved order
    topk: dict[int, jax.Array]  # full layer → [S, K] int32 positions, ascending, padded with −1; empty when not sparse
    margins: Margins


class MtpOutput(NamedTuple):
    """Teacher-forced draft; row i predicts the token at position i + 2."""

    logits: jax.Array  # [S, V]
    hidden: jax.Array  # [S, D], after the draft's own norm: what the next draft step reads
    prenorm: jax.Array  # [S, D]
    topk: jax.Array  # [S, K] int32


@struct.dataclass
class Rows:
    """What one layer keeps of the rows it has seen, in order of position."""

    positions: jax.Array  # [T] int32
    latent: jax.Array  # [T, kv_rank+rope]
    keys: jax.Array | None  # [T, index dim]; None where the layer's indexer did not run


@struct.dataclass
class Selection:
    """Which context rows each query attends to."""

    mask: jax.Array  # [Q, T] bool
    positions: jax.Array  # [Q, K] int32, ascending, padded with −1
    margin: jax.Array  # [Q]


@struct.dataclass
class Layer:
    """Weights of one layer; `indexer` is None in a layer that reuses a selection."""

    attention: Any
    indexer: Any
    ffn: Any


def layer_weights(layers: Layers, kinds: Sequence[LayerKind], at: int) -> Layer:
    """Cuts layer `at` out of the stacks, which hold the layers of a kind in their order."""

    def pick(stack: Any, ordinal: int) -> Any:
        return jax.tree.map(lambda x: x[ordinal], stack)

    kind = kinds[at]
    same_ffn = sum(k.sparse == kind.sparse for k in kinds[:at])
    return Layer(
        attention=pick(layers.attention, at),
        indexer=pick(layers.indexer, sum(k.full for k in kinds[:at])) if kind.full else None,
        ffn=pick(layers.moe if kind.sparse else layers.dense, same_ffn),
    )


def wide(dtype: Any) -> Any:
    """The dtype of statistics and discrete choices: float32, or float64 where the parameters are."""
    return jnp.promote_types(dtype, jnp.float32)


def product(spec: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """Einsum `spec` of `x […]` and `w […]`, in `dtype` (default: x's), without TF32, which would move discrete
    choices."""
    return jnp.einsum(spec, x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype or x.dtype)


def rms_norm(x: jax.Array, w: jax.Array, eps: float) -> jax.Array:
    """`x […, D]` over its root mean square, times `w [D]`; computed in float32 or wider, in x's dtype."""
    v = x.astype(wide(x.dtype))
    return (v * jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + eps)).astype(x.dtype) * w


def layer_norm(x: jax.Array, w: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """`x […, D]` less its mean, over its deviation, times `w [D]`, plus `bias [D]`; in x's dtype."""
    v = x.astype(wide(x.dtype))
    v = v - jnp.mean(v, -1, keepdims=True)
    return (v * jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + eps)).astype(x.dtype) * w + bias


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Interleaved rotary of `x [S, ..., d]`: members 2i and 2i+1 form a pair, and stay where they are."""
    size = x.shape[-1]
    frequency = theta ** (-jnp.arange(0, size, 2, dtype=wide(x.dtype)) / size)
    angle = positions.astype(frequency.dtype)[:, None] * frequency
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), size // 2)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def queries_and_latent(w: Any, a: jax.Array, positions: jax.Array, cfg: ModelConfig):
    """Queries `[Q, H, nope+rope]`, latent rows `[Q, kv_rank+rope]` and the low-rank query `[Q, q_rank]`."""
    low = rms_norm(product("sd,rd->sr", a, w.q_a), w.q_norm, cfg.latent_norm_eps)
    q = product("sr,or->so", low, w.q_b).reshape(len(a), cfg.num_heads, cfg.qk_dim)
    q = jnp.concatenate([q[..., : cfg.nope_dim], rotate(q[..., cfg.nope_dim :], positions, cfg.rope_theta)], -1)
    c, key = jnp.split(product("sd,rd->sr", a, w.kv_a), [cfg.kv_rank], axis=-1)
    c = rms_norm(c, w.kv_norm, cfg.latent_norm_eps)
    return q, jnp.concatenate([c, rotate(key, positions, cfg.rope_theta)], -1), low


def attention_weights(w: Any, q: jax.Array, latent: jax.Array, mask: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Softmax weights `[H, Q, T]` over the rows of `mask [Q, T]`, keys expanded per head."""
    c, key = latent[:, : cfg.kv_rank], latent[:, cfg.kv_rank :]
    keys = product("tc,hnc->thn", c, w.k_b)
    keys = jnp.concatenate([keys, jnp.broadcast_to(key[:, None], (*keys.shape[:2], cfg.rope_dim))], -1)
    scores = product("qhn,thn->hqt", q, keys, wide(q.dtype)) * cfg.softmax_scale
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)


def attention_output(w: Any, weights: jax.Array, latent: jax.Array, cfg: ModelConfig) -> jax.Array:
    """`[Q, D]` from softmax weights `[H, Q, T]`, values expanded per head."""
    values = product("tc,hvc->thv", latent[:, : cfg.kv_rank], w.v_b)
    out = product("hqt,thv->qhv", weights.astype(values.dtype), values)
    return product("qo,do->qd", out.reshape(len(out), -1), w.o)


def index_keys(w: Any, a: jax.Array, positions: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Index keys `[Q, dim]`; rotary on the first values, the other way round than in the attention's queries."""
    keys = layer_norm(product("sd,kd->sk", a, w.k), w.k_norm, w.k_bias, cfg.indexer.norm_eps)
    return _rotate_first(keys, positions, cfg)


def index_scores(
    w: Any, a: jax.Array, low: jax.Array, positions: jax.Array, keys: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """Scores `[Q, T]`, in float32 at least, of every context row for every query. −0.0 does not occur."""
    ix, dtype = cfg.indexer, wide(a.dtype)
    q = product("sr,or->so", low, w.q_b).reshape(len(a), ix.num_heads, ix.head_dim)
    q = _rotate_first(q, positions, cfg)
    share = product("sd,jd->sj", a.astype(dtype), w.head_weight.astype(dtype)) * ix.num_heads**-0.5
    dots = jax.nn.relu(product("sjk,tk->jst", q, keys, dtype) * ix.head_dim**-0.5)
    scores = (share.T[:, :, None] * dots).sum(0)
    return jnp.where(scores == 0, 0, scores)


def _rotate_first(x: jax.Array, positions: jax.Array, cfg: ModelConfig) -> jax.Array:
    first, rest = x[..., : cfg.rope_dim], x[..., cfg.rope_dim :]
    return jnp.concatenate([rotate(first, positions, cfg.rope_theta), rest], -1)


def select(scores: jax.Array, visible: jax.Array, positions: jax.Array, topk: int) -> Selection:
    """The `topk` visible context rows of each query in the order (score descending, position ascending).

    `scores` and `visible` are `[Q, T]`; `positions [T]` are those of the context rows, ascending.
    """
    count, total = scores.shape
    scores = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
    # top_k puts the lower index first among equals, which is the lower position
    best, rows = jax.lax.top_k(scores, min(topk + 1, total))
    margin = jnp.full((count,), jnp.inf, scores.dtype)
    if total > topk:
        margin = jnp.where(best[:, topk] > -jnp.inf, best[:, topk - 1] - best[:, topk], jnp.inf)
    best, rows = best[:, :topk], rows[:, :topk]
    kept = best > -jnp.inf
    mask = jnp.zeros((count, total), bool).at[jnp.arange(count)[:, None], rows].max(kept)
    last = jnp.iinfo(jnp.int32).max
    chosen = jnp.sort(jnp.where(kept, positions[rows].astype(jnp.int32), last), axis=-1)
    chosen = jnp.where(chosen == last, -1, chosen)
    return Selection(mask, jnp.pad(chosen, ((0, 0), (0, topk - chosen.shape[1])), constant_values=-1), margin)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """`x [S, D]` → `[S, D]` through `gate` and `up` `[F, D]` and `down [D, F]`."""
    return product("sf,df->sd", jax.nn.silu(product("sd,fd->sf", x, gate)) * product("sd,fd->sf", x, up), down)


def route(w: Moe, x: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Weight of every expert `[S, E]`, 0 for those not chosen, and the margin `[S]` of the choice."""
    moe, dtype = cfg.moe, wide(x.dtype)
    score = jax.nn.sigmoid(product("sd,ed->se", x.astype(dtype), w.router.astype(dtype)))
    choice = jax.lax.stop_gradient(score + w.router_bias.astype(dtype))
    margin = jnp.full((len(x),), jnp.inf, dtype)
    if moe.num_groups > 1:
        groups = choice.reshape(len(x), moe.num_groups, -1)
        group_score = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
        kept, margin = _largest(group_score, moe.groups_per_token)
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen, gap = _largest(choice, moe.experts_per_token)
    weights = jnp.where(chosen, score, 0)
    if moe.norm_topk:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * moe.scale, jnp.minimum(margin, gap)


def _largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Mask of the `count` largest of each row, lower index first among equals, and the gap to the next one."""
    best, at = jax.lax.top_k(x, min(count + 1, x.shape[-1]))
    mask = jax.nn.one_hot(at[:, :count], x.shape[-1], dtype=bool).any(1)
    gap = best[:, count - 1] - best[:, count] if best.shape[1] > count else jnp.full(len(x), jnp.inf, x.dtype)
    return mask, gap


def mixture(w: Moe, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ weight·expert + shared expert of `x [S, D]`, `weights [S, E]`. Every expert sees every token: simple, and
    exact."""
    inner = jax.nn.silu(product("sd,eid->sei", x, w.gate)) * product("sd,eid->sei", x, w.up)
    routed = product("sei,edi->sd", inner * weights.astype(x.dtype)[..., None], w.down)
    return routed + swiglu(x, w.shared_gate, w.shared_up, w.shared_down)


def feed_forward(w: Dense | Moe, x: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """`[S, D]` and the margin `[S]` of the expert choice."""
    if isinstance(w, Dense):
        return swiglu(x, w.gate, w.up, w.down), jnp.full((len(x),), jnp.inf, wide(x.dtype))
    weights, margin = route(w, x, cfg)
    return mixture(w, x, weights), margin


def decoder_layer(
    w: Layer,
    x: jax.Array,
    positions: jax.Array,
    cfg: ModelConfig,
    selection: Selection | None = None,
    past: Rows | None = None,
) -> tuple[jax.Array, Rows, Selection, jax.Array]:
    """One layer over new rows `x [Q, D]`, whose context is `past` followed by themselves.

    With `selection` None the layer's own indexer chooses; otherwise no index key is made and that selection holds.
    Returns the residual, all context rows, the selection used and the margin `[Q]` of the expert choice.
    """
    a = rms_norm(x, w.attention.input_norm, cfg.norm_eps)
    q, latent, low = queries_and_latent(w.attention, a, positions, cfg)
    keys = index_keys(w.indexer, a, positions, cfg) if selection is None else None
    rows = Rows(positions, latent, keys)
    if past is not None:
        rows = Rows(
            positions=jnp.concatenate([past.positions, positions]),
            latent=jnp.concatenate([past.latent, latent]),
            keys=None if keys is None else jnp.concatenate([past.keys, keys]),
        )
    if selection is None:
        scores = index_scores(w.indexer, a, low, positions, rows.keys, cfg)
        selection = select(scores, _visible(positions, rows.positions), rows.positions, cfg.indexer.topk)
    weights = attention_weights(w.attention, q, rows.latent, selection.mask, cfg)
    x = x + attention_output(w.attention, weights, rows.latent, cfg)
    y, margin = feed_forward(w.ffn, rms_norm(x, w.attention.post_norm, cfg.norm_eps), cfg)
    return x + y, rows, selection, margin


def _visible(queries: jax.Array, context: jax.Array) -> jax.Array:
    return context[None, :] <= queries[:, None]


def _everything(positions: jax.Array, dtype: Any) -> Selection:
    """Dense causal attention."""
    none = jnp.zeros((len(positions), 0), jnp.int32)
    return Selection(_visible(positions, positions), none, jnp.full((len(positions),), jnp.inf, dtype))


def forward(params: Params, tokens: jax.Array, cfg: ModelConfig, *, sparse: bool = True) -> DenseOutput:
    """The target over `tokens [S]` at positions 0…S−1. `sparse=False` attends to all earlier rows instead."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    x = jnp.take(params.embed, tokens, axis=0)
    hidden, latents, topk = [x], [], {}
    selection = None if sparse else _everything(positions, wide(x.dtype))
    near_selection = near_experts = jnp.full((len(tokens),), jnp.inf, wide(x.dtype))
    for i, kind in enumerate(cfg.layers):
        reuse = None if sparse and kind.full else selection
        x, rows, selection, near = decoder_layer(layer_weights(params.layers, cfg.layers, i), x, positions, cfg, reuse)
        hidden.append(x)
        latents.append(rows.latent)
        if reuse is None:
            topk[i] = selection.positions
        near_selection = jnp.minimum(near_selection, selection.margin)
        near_experts = jnp.minimum(near_experts, near)
    final = rms_norm(x, params.norm, cfg.norm_eps)
    logits = product("sd,vd->sv", final, params.head)
    top = jax.lax.top_k(logits, 2)[0]
    margins = Margins(top[:, 0] - top[:, 1], near_selection, near_experts)
    return DenseOutput(logits, jnp.stack(hidden), final, jnp.stack(latents), topk, margins)


def join(w: Mtp, embedded: jax.Array, hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """The draft's input `[S, D]` from the embedding of the next token and the hidden of this one."""
    both = [rms_norm(embedded, w.token_norm, cfg.norm_eps), rms_norm(hidden, w.hidden_norm, cfg.norm_eps)]
    return product("si,di->sd", jnp.concatenate(both, -1), w.join)


def draft_layer(w: Mtp, cfg: ModelConfig) -> Layer:
    """The draft's decoder layer: it always has its own indexer and experts."""
    return layer_weights(w.layers, (LayerKind(full=True, sparse=True),), 0)


def _mtp_rows(params, tokens_next, hidden, positions, cfg, selection=None, past=None):
    w = params.mtp
    u = join(w, jnp.take(params.embed, tokens_next, axis=0), hidden, cfg)
    y, rows, selection, _ = decoder_layer(draft_layer(w, cfg), u, positions, cfg, selection, past)
    f = rms_norm(y, w.out_norm, cfg.norm_eps)
    output = MtpOutput(product("sd,vd->sv", f, params.head), f, y, selection.positions)
    return output, rows, selection


def mtp(params: Params, tokens_next: jax.Array, hidden: jax.Array, cfg: ModelConfig) -> MtpOutput:
    """The draft, teacher forced: row i is (`tokens_next[i]`, `hidden[i]`, position i).

    `hidden [S, D]` is the target's `final_hidden`; `tokens_next [S]` the tokens at positions 1…S.
    """
    positions = jnp.arange(len(tokens_next), dtype=jnp.int32)
    return _mtp_rows(params, tokens_next, hidden, positions, cfg)[0]


def draft(params: Params, tokens: jax.Array, cfg: ModelConfig, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the draft proposes after `tokens [S]` and the target's greedy next token: tokens `[k]`, logits, hidden.

    Draft 1 comes from the pass over all rows; each later one from its predecessor's token and post-norm hidden. With
    `cfg.share_selection` the later ones attend to the selection of row S−1 and to nothing newer; otherwise the
    indexer runs at each, over all rows up to its own.
    """
    size = len(tokens)
    target = forward(params, tokens, cfg)
    following = jnp.append(tokens[1:], jnp.argmax(target.logits[-1]).astype(tokens.dtype))
    positions = jnp.arange(size, dtype=jnp.int32)
    output, rows, selection = _mtp_rows(params, following, target.final_hidden, positions, cfg)
    output = MtpOutput(*(x[-1:] for x in output))
    drafts, last = [output], jax.tree.map(lambda x: x[-1:], selection)
    for step in range(1, k):
        frozen = None
        if cfg.share_selection:
            # the context grows by the row itself, which the frozen set does not hold
            frozen = last.replace(mask=jnp.pad(last.mask, ((0, 0), (0, 1))))
        output, extended, _ = _mtp_rows(
            params,
            jnp.argmax(output.logits, -1).astype(tokens.dtype),
            output.hidden,
            jnp.array([size - 1 + step], jnp.int32),
            cfg,
            frozen,
            rows,
        )
        rows = rows if cfg.share_selection else extended
        drafts.append(output)
    logits = jnp.concatenate([d.logits for d in drafts])
    return (
        jnp.argmax(logits, -1).astype(jnp.int32),
        logits,
        jnp.concatenate([d.hidden for d in drafts]),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def _next_token(params: Params, tokens: jax.Array, length: jax.Array, cfg: ModelConfig) -> jax.Array:
    # rows past `length` are padding: causal, so nothing before them can see them
    return jnp.argmax(forward(params, tokens, cfg).logits[length - 1])


def generate(
    params: Params, prompt: Sequence[int], max_tokens: int, cfg: ModelConfig, eos: Collection[int] = ()
) -> list[int]:
    """Greedy continuation of `prompt`, everything recomputed for each token; a token of `eos` ends it and is kept."""
    tokens = list(prompt)
    size = -(-(len(prompt) + max_tokens) // 64) * 64
    for _ in range(max_tokens):
        padded = jnp.array(tokens + [0] * (size - len(tokens)), jnp.int32)
        tokens.append(int(_next_token(params, padded, jnp.int32(len(tokens)), cfg)))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
