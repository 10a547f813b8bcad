"""A random checkpoint of three small layers, the same in every run, for tests of the real engine."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from models import dense
from models.config import from_hf
from models.params import Params, init
from models.saving import save

VOCAB = 64
EOS = (62, 63)
RAW = {
    "model_type": "glm_moe_dsa",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 6,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "shared", "full"],
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "eos_token_id": list(EOS),
}
CONFIG = from_hf(RAW)
# Every token is one of these characters, but for the last two.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@functools.cache
def params(seed: int = 0) -> Params:
    """Random weights; norms and biases are not those of a fresh network."""
    leaves, tree = jax.tree.flatten(init(CONFIG, jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
    moved = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return tree.unflatten(moved)


def write_checkpoint(folder: pathlib.Path, *, tokenizer: bool = False) -> pathlib.Path:
    """Saves the checkpoint, with a tokenizer of one character a token if asked for."""
    save(params(), CONFIG, folder, raw_config=RAW)
    if tokenizer:
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        inner.add_special_tokens(["<|endoftext|>", "<|user|>"])
        inner.save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def _double() -> Params:
    with jax.enable_x64(True):
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), params())


@jax.jit
def _forward(weights: Params, tokens: jax.Array) -> tuple[jax.Array, dense.Margins]:
    out = dense.forward(weights, tokens, CONFIG)
    return out.logits, out.margins


def oracle(tokens: list[int]) -> tuple[np.ndarray, dense.Margins]:
    """Logits `[S, V]` and margins of the plain forward in float64."""
    size = -(-len(tokens) // 64) * 64
    padded = np.array(tokens + [0] * (size - len(tokens)), np.int32)
    with jax.enable_x64(True):
        logits, margins = _forward(_double(), padded)
    return np.asarray(logits)[: len(tokens)], jax.tree.map(lambda x: np.asarray(x)[: len(tokens)], margins)
