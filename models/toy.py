"""Toy networks for benchmarks: shapes chosen for what they cost, weights at random.

Their text means nothing. What is real is the path of a token: every layer, the indexer, the draft and the caches.
"""

import jax

from dcpjax.mesh import MeshPlan
from models import params
from models.config import IndexerConfig, LayerKind, ModelConfig, MoeConfig
from models.params import Params


def long_context(num_layers: int = 6, dense_width: int = 64, max_position: int = 1 << 20) -> ModelConfig:
    """A network whose step costs little but for the indexer's scan of the context, which nothing spares it.

    Every layer is full, and every iteration of the draft makes its own selection, so a step scans the keys once for each
    layer and draft iteration. `dense_width` is the knob of the cost that does not grow with the context.
    """
    return ModelConfig(
        vocab_size=128,
        hidden_size=64,
        num_heads=8,
        q_rank=32,
        kv_rank=16,
        nope_dim=8,
        rope_dim=8,
        v_dim=8,
        dense_width=dense_width,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        latent_norm_eps=1e-5,
        max_position=max_position,
        eos_token_ids=(),
        pad_token_id=0,
        layers=(LayerKind(full=True, sparse=False),) * num_layers,
        indexer=IndexerConfig(num_heads=16, head_dim=32, topk=16),
        moe=MoeConfig(
            num_experts=2,
            experts_per_token=1,
            width=8,
            shared_width=8,
            num_groups=1,
            groups_per_token=1,
            norm_topk=True,
            scale=1.0,
        ),
        has_mtp=True,
        share_selection=False,
    )


def weights(cfg: ModelConfig, plan: MeshPlan, seed: int = 0) -> Params:
    """Random float32 weights of `cfg`, padded and laid on the mesh; the same network on every mesh."""
    return params.pad_to(params.init(cfg, jax.random.key(seed)), cfg, plan)
