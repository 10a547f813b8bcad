"""A random network of a few small layers, and runners of it on any mesh."""

import functools

import jax.numpy as jnp
import numpy as np

from dcpjax.attention import AttentionOptions
from dcpjax.buckets import Limits
from dcpjax.cache import PagedCache, Record, make_pool
from dcpjax.runner import Runner
from models.config import ModelConfig, from_hf
from models.glm_moe_dsa import Network
from models.params import Params, Weight, declare, map_weights, pad_to
from tests.attention.paged import PAGE, Geometry, on_device

RAW = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}


def config(indexer: str = "FSF", ffn: str = "DMM", **more) -> ModelConfig:
    """Layers by their letters: F selects, S shares; D is dense, M has experts."""
    kinds = {"F": "full", "S": "shared", "D": "dense", "M": "sparse"}
    layers = {"indexer_types": [kinds[x] for x in indexer], "mlp_layer_types": [kinds[x] for x in ffn]}
    return from_hf({**RAW, "num_hidden_layers": len(indexer), **layers, **more})


@functools.cache
def params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Unpadded random weights, drawn with numpy: nothing to compile. Norms and biases are not a fresh network's."""
    rng = np.random.default_rng(seed)

    def draw(w: Weight) -> np.ndarray:
        x = rng.normal(size=w.full_shape).astype(np.float32)
        if w.start in ("one", "zero"):
            return np.float32(w.start == "one") + 0.1 * x
        return x if w.start == "normal" else x * np.float32(w.size[-1] ** -0.5)

    return map_weights(draw, declare(cfg))


@functools.cache
def sharded_params(cfg: ModelConfig, tp: int, dcp: int) -> Params:
    return pad_to(params(cfg), cfg, Geometry(dcp, tp=tp).plan)


def cache(cfg: ModelConfig, geometry: Geometry, draft: bool = False, fill: float = 0.0) -> PagedCache:
    """Pools of the target, or of the draft."""
    latent, index = (Record(w, jnp.float32) for w in (cfg.latent_width, cfg.indexer.head_dim))
    sizes = (1, 1) if draft else (cfg.num_layers, cfg.num_full_layers)
    return PagedCache(
        make_pool(sizes[0], geometry.latent, latent, geometry.plan, fill),
        make_pool(sizes[1], geometry.index, index, geometry.plan, fill),
        first_slot=int(draft),
    )


def runner(
    cfg: ModelConfig,
    geometry: Geometry,
    options: AttentionOptions,
    seqs: int = 2,
    tokens: int = 16,
    length: int = 3 * PAGE,
) -> Runner:
    return Runner(
        Network(cfg, geometry.plan, on_device(options)),
        sharded_params(cfg, geometry.tp, geometry.dcp),
        cache(cfg, geometry),
        cache(cfg, geometry, draft=True),
        Limits(seqs, tokens, length),
        (),
    )
