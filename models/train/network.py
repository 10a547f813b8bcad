"""What training differentiates: the parts of `models.dense`, put together so that losses can be taken on the way.

Functions take one sequence and are batched with `vmap`. Sparse attention is dense attention cut down to the selection
and renormalised, which is the same number; its whole row is what the indexer is taught. Tokens are int32; losses,
weights and statistics float32; hidden states have the parameters' dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from models import dense
from models.config import ModelConfig
from models.params import Params

# How much of the index loss reaches the layers whose result the indexer reads.
_BEND = 0.3


@struct.dataclass
class Pass:
    """Result of the layers over one sequence."""

    hidden: jax.Array  # [S, D]
    index_loss: jax.Array  # mean cross-entropy of the index softmax against the attention, summed over layers
    load: jax.Array  # [n, E], share of the choices that fell on each expert


@struct.dataclass
class _Index:
    """What a full layer hands to those that reuse its selection."""

    mask: jax.Array  # [S, S]
    log_weights: jax.Array | None  # [S, S], log of the index softmax


def half(params: Any) -> Any:
    """Parameters as they will be stored: bfloat16 but for the router's bias."""
    return jax.tree.map_with_path(
        lambda path, x: x if path[-1].name == "router_bias" else x.astype(jnp.bfloat16), params
    )


def top_mask(scores: jax.Array, visible: jax.Array, count: int) -> jax.Array:
    """Mask `[S, S]` bool of the `count` largest visible `scores [S, S]` of each row, all of several equal last ones.

    Bisects the bits of the scores as ordered integers: it reads them 32 times but never sorts.
    """
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    ordered = jnp.where(visible, ordered, jnp.iinfo(jnp.int32).min)

    def step(i: jax.Array, low: jax.Array) -> jax.Array:
        # the offset turns signed order into plain bits, highest first
        trial = low + jnp.left_shift(jnp.uint32(1), (31 - i).astype(jnp.uint32))
        at = jax.lax.bitcast_convert_type(trial ^ jnp.uint32(0x80000000), jnp.int32)
        return jnp.where((ordered >= at[:, None]).sum(-1) >= count, trial, low)

    low = jax.lax.fori_loop(0, 32, step, jnp.zeros(len(scores), jnp.uint32))
    least = jax.lax.bitcast_convert_type(low ^ jnp.uint32(0x80000000), jnp.int32)
    return visible & (ordered >= least[:, None])


def _index(w: Any, a: jax.Array, low: jax.Array, at: jax.Array, visible: jax.Array, cfg: ModelConfig, sparse: bool):
    # The layers below also learn to bring along what the choice needs, but gently.
    a, low = (_BEND * x + jax.lax.stop_gradient((1 - _BEND) * x) for x in (a, low))
    scores = dense.index_scores(w, a, low, at, dense.index_keys(w, a, at, cfg), cfg)
    mask = top_mask(jax.lax.stop_gradient(scores), visible, cfg.indexer.topk) if sparse else visible
    return _Index(mask, jax.nn.log_softmax(jnp.where(visible, scores, -1e9)))


def _cut(weights: jax.Array, mask: jax.Array) -> jax.Array:
    kept = jnp.where(mask, weights, 0)
    return kept / (kept.sum(-1, keepdims=True) + 1e-20)


def _teach(weights: jax.Array, index: _Index, share: jax.Array) -> jax.Array:
    """Cross-entropy against the attention, queries weighted by `share [S]`.

    What any one head looks at hard must be kept, so a row's target is its largest weight over the heads.
    """
    target = jax.lax.stop_gradient(weights).max(0)
    target = target / target.sum(-1, keepdims=True)
    return -((target * index.log_weights).sum(-1) * share).sum() / (share.sum() + 1e-6)


def _ffn(w: Any, x: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array | None]:
    if isinstance(w, dense.Dense):
        return dense.feed_forward(w, x, cfg)[0], None
    weights, _ = dense.route(w, x, cfg)
    return dense.mixture(w, x, weights), (weights > 0).mean(0) / cfg.moe.experts_per_token


def _layer(w, x, index, share, cfg, sparse, teach):
    at = jnp.arange(len(x))
    visible = at[None, :] <= at[:, None]
    a = dense.rms_norm(x, w.attention.input_norm, cfg.norm_eps)
    q, latent, low = dense.queries_and_latent(w.attention, a, at, cfg)
    if w.indexer is not None:
        index = _index(w.indexer, a, low, at, visible, cfg, sparse) if sparse or teach else _Index(visible, None)
    weights = dense.attention_weights(w.attention, q, latent, visible, cfg)
    loss = _teach(weights, index, share) if teach else jnp.float32(0)
    if sparse:
        weights = _cut(weights, index.mask)
    x = x + dense.attention_output(w.attention, weights, latent, cfg)
    y, load = _ffn(w.ffn, dense.rms_norm(x, w.attention.post_norm, cfg.norm_eps), cfg)
    return x + y, index, latent, loss, load


def trunk(params: Params, tokens: jax.Array, cfg: ModelConfig, *, sparse: bool, teach: jax.Array | None = None) -> Pass:
    """The target over `tokens [S]`; `hidden` is after the last norm. `teach [S]` weighs the queries' index loss."""
    x = jnp.take(params.embed, tokens, axis=0)
    index, losses, loads = None, [], []
    step = jax.checkpoint(_layer, static_argnums=(4, 5, 6))
    for i in range(cfg.num_layers):
        w = dense.layer_weights(params.layers, cfg.layers, i)
        x, index, _, loss, load = step(w, x, index, teach, cfg, sparse, teach is not None)
        losses.append(loss)
        loads += [load] if load is not None else []
    return Pass(dense.rms_norm(x, params.norm, cfg.norm_eps), sum(losses), jnp.stack(loads))


def drafts(
    params: Params, tokens: jax.Array, hidden: jax.Array, cfg: ModelConfig, k: int, teach: jax.Array | None = None
) -> Pass:
    """Hidden `[k, S, D]` of k drafts from every row, each fed the true tokens, on the selection of the first.

    Draft j of row i reads token i + j and stands at position i + j − 1; it predicts token i + j + 1. Rows of the
    sequence's end read tokens that are not there (id 0): their results mean nothing.
    """
    w = params.mtp
    layer = dense.draft_layer(w, cfg)
    out, index, latent, losses, loads = [], None, None, [], []

    def one(layer, u, index, latent, at):
        if latent is None:
            return _layer(layer, u, None, teach, cfg, True, teach is not None)
        a = dense.rms_norm(u, layer.attention.input_norm, cfg.norm_eps)
        q, _, _ = dense.queries_and_latent(layer.attention, a, at, cfg)
        weights = dense.attention_weights(layer.attention, q, latent, index.mask, cfg)
        u = u + dense.attention_output(layer.attention, weights, latent, cfg)
        y, load = _ffn(layer.ffn, dense.rms_norm(u, layer.attention.post_norm, cfg.norm_eps), cfg)
        return u + y, index, latent, jnp.float32(0), load

    for j in range(1, k + 1):
        token = jnp.pad(tokens[j:], (0, j))
        u = dense.join(w, jnp.take(params.embed, token, axis=0), hidden, cfg)
        y, index, latent, loss, load = jax.checkpoint(one)(layer, u, index, latent, jnp.arange(len(tokens)) + j - 1)
        hidden = dense.rms_norm(y, w.out_norm, cfg.norm_eps)
        out.append(hidden)
        losses.append(loss)
        loads.append(load)
    return Pass(jnp.stack(out), sum(losses), sum(loads)[None] / k)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """`hidden […, D]` → `[…, V]` float32."""
    return dense.product("...d,vd->...v", hidden, params.head, jnp.float32)


def next_token_loss(
    params: Params, rows: jax.Array, weights: jax.Array, cfg: ModelConfig, *, sparse: bool, teach: bool
):
    """Weighted mean loss of rows `[B, S+1]`, plus the index loss; auxiliary: loss, index loss, expert load."""
    params = half(params)

    def one(row: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = trunk(params, row[:-1], cfg, sparse=sparse, teach=weight if teach else None)
        values = logits(params, out.hidden)
        loss = jax.nn.logsumexp(values, -1) - jnp.take_along_axis(values, row[1:, None], -1)[:, 0]
        return loss, out.index_loss, out.load

    losses, index_losses, load = jax.vmap(one)(rows, weights)
    loss, index_loss = (losses * weights).sum() / weights.sum(), index_losses.mean()
    return loss + index_loss, {"loss": loss, "index": index_loss, "load": load.mean(0)}


def draft_loss(mtp: Any, params: Params, rows: jax.Array, weights: jax.Array, cfg: ModelConfig, k: int):
    """Σ 0.9^(j−1) · cross-entropy of draft j against the target's own distribution, over rows `[B, S+1]`."""
    params = half(params.replace(mtp=mtp))
    size = rows.shape[1] - 1

    def one(row: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        target = jax.lax.stop_gradient(trunk(params, row[:-1], cfg, sparse=True).hidden)
        out = drafts(params, row[:-1], target, cfg, k, teach=weight)
        teacher = jax.nn.softmax(logits(params, target))
        best = jnp.argmax(teacher, -1)
        losses, hits = [], []
        for j in range(1, k + 1):
            guess = logits(params, out.hidden[j - 1][: size - j])
            w = weight[j:]
            loss = -(teacher[j:] * jax.nn.log_softmax(guess)).sum(-1)
            losses.append(0.9 ** (j - 1) * (loss * w).sum() / (w.sum() + 1e-6))
            hits.append(((jnp.argmax(guess, -1) == best[j:]) * w).sum() / (w.sum() + 1e-6))
        return sum(losses), jnp.stack(hits), out.index_loss, out.load

    loss, hits, index_loss, load = jax.vmap(one)(rows, weights)
    loss, index_loss = loss.mean(), index_loss.mean()
    return loss + index_loss, {"loss": loss, "index": index_loss, "load": load.mean(0), "hits": hits.mean(0)}
