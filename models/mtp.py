"""The draft (MTP): one decoder layer that predicts the token after next from a token and a hidden state.

Row i joins token x[i+1] with the hidden state h[i] after the final norm, at RoPE position i, and lies in slot i + 1 of
the draft's pools; it predicts x[i+2]. Its own hidden state after `out_norm` is what the next iteration recycles.
"""

import jax
import jax.numpy as jnp

from dcpjax import moe
from dcpjax.attention import Selection
from dcpjax.batch import ForwardBatch
from dcpjax.cache import PagedCache
from models.config import LayerKind
from models.glm_moe_dsa import Network, Place, decoder_layer, project
from models.layers import rms_norm
from models.params import Params


def draft(
    params: Params, cache: PagedCache, batch: ForwardBatch, hidden: jax.Array, net: Network,
    selection: Selection | None = None,
) -> tuple[jax.Array, jax.Array, PagedCache, Selection]:  # fmt: skip
    """Runs the draft on `batch.tokens [T]` (each the token *after* its hidden state) and `hidden [T, D]`.

    With a `selection` given the iteration is frozen: no indexer runs and nothing is written (give write slots of
    nowhere). Returns hidden states after and before the out norm `[T, D]`, in hidden's dtype, the cache, and the
    selection used. Source: multi-token prediction of DeepSeek-V3 (section 2.2), one module that is run again.
    """
    w, cfg = params.mtp, net.cfg
    token = rms_norm(moe.embed(params.embed, batch.tokens, net.plan), w.token_norm, cfg.norm_eps)
    joined = jnp.concatenate([token, rms_norm(hidden, w.hidden_norm, cfg.norm_eps)], axis=-1)
    h = net.plan.constrain(project(joined, w.join, net))
    kind = LayerKind(full=True, sparse=True)
    h, cache, selection = decoder_layer(w.layers, kind, Place(0, 0, 0, 0), h, cache, batch, selection, net)
    return rms_norm(h, w.out_norm, cfg.norm_eps), h, cache, selection
