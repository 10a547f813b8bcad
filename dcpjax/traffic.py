"""What crosses devices in a step: how often, and how many bytes every device receives, from sizes alone."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from dcpjax.build import Resolved


@dataclasses.dataclass(frozen=True)
class Crossing:
    """One collective. where: "layer" (every one), "full layer" (those that select), "step", "draft" (every iteration).
    nbytes: received by a device at each of `times` in a step."""

    where: str
    operation: str
    nbytes: float
    times: int


def crossings(ready: Resolved, rows: int) -> tuple[Crossing, ...]:
    """Of a decode step of `rows` requests, drafts included: the same that `tests/attention/test_collectives_count.py`
    reads from compiled programs.

    A sum over n devices is counted as a reduce-scatter and a gather: each receives 2 (n − 1)/n of what it has.
    """
    net, spec = ready.net, ready.speculation
    if net.plan.num_devices == 1:
        return ()
    drafts = 0 if spec is None else spec.num_drafts
    tokens, layers = rows * (drafts + 1), net.cfg.num_layers
    sizes = _Sizes.of(ready)
    found = [
        Crossing("step", "sum of embeddings", sizes.summed(tokens), 1),
        *(Crossing("layer", name, sizes.summed(tokens), layers) for name in ("sum after attention", "sum after ffn")),
        *(Crossing("layer", name, n, layers) for name, n in sizes.attention(tokens, net.plan.dcp)),
        *(
            Crossing("full layer", n, b, net.cfg.num_full_layers)
            for n, b in sizes.selection(tokens, ready.shape.index_shards)
        ),
        Crossing("step", "gather of logits", sizes.logits(tokens), 1),
    ]
    if spec is None:
        return tuple(found)
    # The first iteration has the rows of all verified tokens, the others one a request.
    index_shards = min(ready.shape.draft_shards, ready.shape.index_shards)
    for some, times in ((tokens, 1), (rows, max(drafts - 1, 0))):
        for what in ("embeddings", "attention", "ffn"):
            found.append(Crossing("draft", f"sum of {what}", sizes.summed(some), times))
        found += [Crossing("draft", name, n, times) for name, n in sizes.attention(some, ready.shape.draft_shards)]
        if some == tokens or not net.cfg.share_selection:
            found += [Crossing("draft", name, n, times) for name, n in sizes.selection(some, index_shards)]
    found.append(Crossing("draft", "gather of logits", sizes.logits(rows), drafts))
    return tuple(c for c in found if c.times)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    devices: int
    dcp: int
    hidden: int
    heads: int  # on a device
    latent: int
    value: int
    topk: int
    vocab: int
    itemsize: int
    backend: str

    @classmethod
    def of(cls, ready: Resolved) -> "_Sizes":
        cfg, plan = ready.net.cfg, ready.net.plan
        return cls(
            devices=plan.num_devices,
            dcp=plan.dcp,
            hidden=cfg.hidden_size,
            heads=plan.pad(cfg.num_heads) // plan.num_devices,
            latent=cfg.latent_width,
            value=cfg.kv_rank,
            topk=cfg.indexer.topk,
            vocab=plan.pad(cfg.vocab_size),
            itemsize=jnp.dtype(ready.dtype).itemsize,
            backend=ready.net.options.backend,
        )

    def summed(self, tokens: int) -> float:
        return 2 * (self.devices - 1) / self.devices * tokens * self.hidden * self.itemsize

    def logits(self, rows: int) -> float:
        return (self.devices - 1) / self.devices * rows * self.vocab * 4

    def attention(self, tokens: int, shards: int) -> Iterator[tuple[str, float]]:
        """Queries to the rows, parts back. Heads are those of a device, so the group has dcp times as many."""
        if shards == 1:
            return
        others, heads = shards - 1, tokens * self.heads
        yield "gather of queries", others * heads * self.latent * self.itemsize
        if self.backend == "a2a":
            # The LSE is a float32 behind each part.
            yield "exchange of parts", others * heads * (self.value * self.itemsize + 4)
            return
        yield "gather of LSE", others * heads * self.dcp * 4
        part = others * heads * self.value * 4
        yield ("sum of parts", 2 * part) if self.backend == "psum" else ("scatter of parts", part)

    def selection(self, tokens: int, shards: int) -> Iterator[tuple[str, float]]:
        """A score and a slot for each candidate."""
        if shards > 1:
            yield "gather of candidates", (shards - 1) * tokens * self.topk * 8
