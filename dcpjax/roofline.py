"""The least time of a decode step: bytes that a device must read from its memory, over its bandwidth.

Every weight that a step needs is read once, of the experts those that its tokens chose (with uniform routing); the rows
that attention selected, once for each token; the index keys of the whole context, once for each request.
"""

import dataclasses
import functools

import numpy as np

from dcpjax.build import Resolved
from dcpjax.footprint import weight_groups
from models.params import Params
from models.stored import bytes_per_device

# Groups of which a step reads all, every time.
_ALWAYS = ("attention", "indexers", "dense", "shared experts", "router")


@dataclasses.dataclass(frozen=True)
class Chip:
    """bandwidth: bytes/s of its memory. flops: of products in bfloat16. link: bytes/s to other devices, one way."""

    bandwidth: float = 4.8e12
    flops: float = 989e12
    link: float = 450e9


H200 = Chip()


@dataclasses.dataclass(frozen=True)
class Floor:
    """Seconds by what is read: weights of the target, its selected rows, its index keys, and all that drafts need."""

    weights: float
    attention: float
    index: float
    drafts: float

    @property
    def total(self) -> float:
        """Seconds of the step: one after the other, as they read the same memory."""
        return self.weights + self.attention + self.index + self.drafts


def step_floor(ready: Resolved, params: Params, rows: int, context: int, chip: Chip = H200) -> Floor:
    """Of a decode step of `rows` requests with `context` tokens each. `params`: shapes with shardings."""
    cfg, plan, spec, shape = ready.net.cfg, ready.net.plan, ready.speculation, ready.shape
    drafts = 0 if spec is None else spec.num_drafts
    tokens, topk = rows * (drafts + 1), min(cfg.indexer.topk, context)
    groups = weight_groups(params)

    def experts(nbytes: int, tokens: int) -> float:
        return nbytes * expert_share(tokens, cfg.moe.num_experts, cfg.moe.experts_per_token, _parts(ready))

    def attend(tokens: int, shards: int) -> float:
        """Bytes, or products where those take longer: heads of the whole group, over its rows of each list."""
        heads = plan.pad(cfg.num_heads) / plan.num_devices * shards
        products = 2 * tokens * heads * topk / shards * (cfg.latent_width + cfg.kv_rank)
        return max(tokens * topk * shape.latent.nbytes / shards / chip.bandwidth, products / chip.flops)

    def scan(shards: int) -> float:
        return rows * context * shape.index.nbytes / shards / chip.bandwidth

    head = bytes_per_device(params.head)
    read = sum(groups[name] for name in _ALWAYS) + head + experts(groups["experts"], tokens)
    draft = 0.0
    if spec is not None:
        moe = params.mtp.layers.moe
        stacks = bytes_per_device((moe.gate, moe.up, moe.down))
        passes = [tokens] + [rows] * (drafts - 1)
        draft = sum(groups["MTP"] - stacks + experts(stacks, n) for n in passes) + drafts * head
        draft = draft / chip.bandwidth + sum(attend(n, shape.draft_shards) for n in passes)
        scans = 1 if cfg.share_selection else len(passes)
        draft += scans * scan(min(shape.draft_shards, shape.index_shards))
    return Floor(
        weights=read / chip.bandwidth,
        attention=cfg.num_layers * attend(tokens, plan.dcp),
        index=cfg.num_full_layers * scan(shape.index_shards),
        drafts=draft,
    )


def _parts(ready: Resolved) -> int:
    """Devices that the experts are dealt out to whole."""
    return ready.net.plan.num_devices if ready.net.plan.expert_parallel else 1


@functools.cache
def expert_share(tokens: int, experts: int, per_token: int, parts: int) -> float:
    """Share of its experts that a device reads for `tokens`, of the busiest of `parts` devices, in the mean.

    With one part `1 − (1 − k/E)^T`; with several the mean of 200 draws.
    """
    if parts == 1:
        return 1 - (1 - per_token / experts) ** tokens
    rng, places = np.random.default_rng(0), -(-experts // parts)
    busiest = []
    for _ in range(200):
        chosen = np.zeros(parts * places, bool)
        order = rng.random((min(tokens, 4 * experts), experts)).argpartition(per_token - 1, axis=1)
        chosen[order[:, :per_token]] = True
        busiest.append(chosen.reshape(parts, places).sum(axis=1).max())
    return float(np.mean(busiest)) / places
