"""What the capacity formula says of caches that other engines have published, each in its own layout."""

import argparse
import dataclasses
from collections.abc import Iterator

from dcpjax.capacity import CacheShape, cache_shape
from dcpjax.mesh import abstract_plan
from models.config import from_hf
from models.published import GLM_5_2


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an engine deals its cache out: index_copies ranks of a group hold the same index keys; the draft's layer is dealt
    out over draft_shards ranks, its index keys over draft_index_shards of them."""

    dcp: int
    index_copies: int = 1
    draft_shards: int = 1
    draft_index_shards: int = 1

    def bytes_per_token(self) -> float:
        """On one device, in 8-bit records. Some layouts are none of ours, so the sum is written out."""
        cfg = from_hf(GLM_5_2)
        ours = cache_shape(cfg, abstract_plan(self.dcp, self.dcp), "fp8")
        target = dataclasses.replace(ours, index_shards=self.dcp // self.index_copies, has_draft=False)
        return target.bytes_per_token() + self._draft(ours)

    def _draft(self, shape: CacheShape) -> float:
        return shape.latent.nbytes / self.draft_shards + shape.index.nbytes / self.draft_index_shards

    def __str__(self) -> str:
        index = "index dealt out" if self.index_copies == 1 else f"{self.index_copies} copies of the index"
        whole = (self.draft_shards, self.draft_index_shards) == (1, 1)
        draft = "draft whole on every rank" if whole else "draft dealt out"
        if not whole and self.draft_index_shards != self.draft_shards:
            draft += f", {self.draft_shards // self.draft_index_shards} copies of its index"
        return "dcp 1" if self.dcp == 1 else f"dcp {self.dcp}, {index}, {draft}"


@dataclasses.dataclass(frozen=True)
class Point:
    """A published ratio of tokens, `layout` over `base`."""

    source: str
    layout: Layout
    base: Layout
    published: float

    @property
    def predicted(self) -> float:
        """The same ratio by `bytes_per_token`."""
        return self.base.bytes_per_token() / self.layout.bytes_per_token()


_DEALT8, _DEALT4 = Layout(8, 1, 8, 8), Layout(4, 1, 4, 4)
POINTS = (
    Point("local-inference-lab/vllm#28", _DEALT4, Layout(4, 1, 1, 1), 1.045),
    Point("rtx6kpro#35", Layout(8, 8, 8, 1), _DEALT8, 0.734),
    Point("rtx6kpro#35", Layout(8, 2, 8, 4), _DEALT8, 0.950),
    Point("rtx6kpro#35", Layout(4, 2, 4, 2), _DEALT4, 0.950),
    Point("sglang#31821", Layout(2, 2, 1, 1), Layout(1), 1.855),
)


def table() -> Iterator[str]:
    """Markdown."""
    yield "| published in | layout | bytes a token | over | bytes a token | predicted | published | off |"
    yield "|---|---|---|---|---|---|---|---|"
    for p in POINTS:
        sizes = (f"{x.bytes_per_token():,.0f}" for x in (p.layout, p.base))
        mine, base = sizes
        off = f"{p.predicted / p.published - 1:+.1%}".replace("%", " %")
        yield f"| {p.source} | {p.layout} | {mine} | {p.base} | {base} | {p.predicted:.3f} | {p.published:.3f} | {off} |"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.set_defaults(run=lambda _: print("\n".join(table())))
