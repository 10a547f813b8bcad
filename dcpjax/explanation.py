"""What a configuration means: which rank owns which token, what that takes, what crosses devices. Text and SVG.

In a notebook the value of `explain_plan(llm.plan)` shows itself as a picture; `print` shows the text.
"""

import dataclasses
from collections.abc import Iterator

from dcpjax import capacity
from dcpjax.build import Resolved
from dcpjax.layout import CacheLayout
from dcpjax.picture import FAINT, Picture, colour
from dcpjax.runner import Runner
from dcpjax.traffic import Crossing, crossings

# Rows of a page that are shown; a longer page goes on in the same way.
MOST_ROWS = 16
MANY_TOKENS = 1 << 20


@dataclasses.dataclass(frozen=True)
class PoolPart:
    """One pool as a rank holds it. nbytes: of one token's row in one layer. tokens `[ranks][rows]`: the token of a page in
    each of a rank's rows; one entry for all ranks if each of them holds every row. first_slot: the first that is ever
    written (1 for the draft, whose row of token i comes from hidden state i − 1)."""

    name: str
    num_layers: int
    nbytes: int
    layout: CacheLayout
    tokens: tuple[tuple[int, ...], ...]
    first_slot: int

    @property
    def bytes_per_token(self) -> float:
        """On one rank, all layers: an average, since a rank holds whole rows of some tokens."""
        return self.num_layers * self.nbytes / self.layout.shards


@dataclasses.dataclass(frozen=True)
class Explanation:
    """See `explain_plan`. `str()` is a text of a screen, `svg()` a picture of the same."""

    tp: int
    dcp: int
    page_tokens: int
    interleave: int
    num_layers: int
    num_full: int
    pools: tuple[PoolPart, ...]
    crossings: tuple[Crossing, ...]

    @property
    def bytes_per_token(self) -> float:
        """Of a token on one rank, all pools."""
        return sum(pool.bytes_per_token for pool in self.pools)

    @property
    def alike(self) -> list[tuple[str, PoolPart]]:
        """Pools that are dealt out in the same way, by their names, and one of them."""
        names: dict[int, list[PoolPart]] = {}
        for pool in self.pools:
            names.setdefault(pool.layout.shards, []).append(pool)
        return [(", ".join(pool.name for pool in pools), pools[0]) for pools in names.values()]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def svg(self) -> str:
        """The picture, an SVG document."""
        return _draw(self).render()

    def _repr_svg_(self) -> str:
        return self.svg()


def explain_plan(plan: Resolved) -> Explanation:
    """Who owns which token, bytes on a rank, and what crosses devices in a decode step of one request.

    `plan`: `LLM.plan`, or a configuration that `dcpjax.build.resolve` has checked; `python -m dcpjax.explain` makes one from
    the flags of the server.
    """
    cfg, mesh = plan.net.cfg, plan.net.plan
    return Explanation(
        tp=mesh.tp,
        dcp=mesh.dcp,
        page_tokens=plan.layout.page_tokens,
        interleave=plan.layout.interleave,
        num_layers=cfg.num_layers,
        num_full=cfg.num_full_layers,
        pools=tuple(_pools(plan)),
        crossings=crossings(plan, rows=1),
    )


def plan_of(runner: Runner) -> Resolved:
    """The configuration that a running engine has, read from its pools."""
    net, latent, draft = runner.net, runner.cache.latent, runner.draft_cache
    kind = latent.data.dtype.name if latent.record.packed is None else "fp8"
    kept = "sharded" if draft is None or draft.latent.layout.shards > 1 else "replicated"
    return Resolved(
        net=net,
        dtype=runner.params.norm.dtype,
        shape=capacity.cache_shape(net.cfg, net.plan, kind, runner.cache.index.layout.shards, kept),
        layout=latent.layout,
        limits=runner.limits,
        speculation=runner.spec,
        zero_new_pages=runner.zeroes_new_pages,
    )


def _pools(plan: Resolved) -> Iterator[PoolPart]:
    shape = plan.shape
    index_shards = min(shape.ranks, shape.index_shards)
    yield _pool("target latent", shape.num_layers, shape.latent.nbytes, plan.layout, shape.ranks, 0)
    yield _pool("target index", shape.num_index, shape.index.nbytes, plan.layout, index_shards, 0)
    if shape.has_draft:
        draft, index = shape.draft_shards, min(shape.draft_shards, shape.index_shards)
        yield _pool("draft latent", 1, shape.latent.nbytes, plan.layout, draft, 1)
        yield _pool("draft index", 1, shape.index.nbytes, plan.layout, index, 1)


def _pool(name: str, num_layers: int, nbytes: int, like: CacheLayout, shards: int, first_slot: int) -> PoolPart:
    layout = dataclasses.replace(like, shards=shards)
    tokens = tuple(tuple(layout.slot(row, rank) for row in range(layout.page_rows)) for rank in range(shards))
    return PoolPart(name, num_layers, nbytes, layout, tokens, first_slot)


# --- text ---------------------------------------------------------------------------------------------------------


def _lines(found: Explanation) -> Iterator[str]:
    yield f"Mesh: {found.tp * found.dcp} devices, tp {found.tp} × dcp {found.dcp} (groups × ranks). A page is {found.page_tokens} tokens; ranks take"
    yield f"turns of {found.interleave}. One page id names the same page in every pool and on every rank."
    for names, pool in found.alike:
        yield ""
        yield from _pool_lines(names, pool)
    if any(pool.first_slot for pool in found.pools):
        yield ""
        yield "The draft's row of token i comes from hidden state i − 1: a sequence's token 0 has none, its place stays empty."
    yield ""
    yield from _byte_lines(found)
    yield ""
    yield from _crossing_lines(found)


def _pool_lines(names: str, pool: PoolPart) -> Iterator[str]:
    shards, rows = pool.layout.shards, pool.layout.page_rows
    where = f"{shards} shards" if shards > 1 else "whole on every rank"
    yield f"{names}: {where}; a rank holds {rows} rows of a page, with the tokens"
    shown, dots = min(rows, MOST_ROWS), " …" if rows > MOST_ROWS else ""
    width = max(3, len(str(pool.layout.page_tokens)) + 1)
    yield "  row      " + "".join(f"{row:>{width}}" for row in range(shown)) + dots
    for rank, tokens in enumerate(pool.tokens):
        name = f"rank {rank}" if shards > 1 else "any rank"
        yield f"  {name:<9}" + "".join(f"{token:>{width}}" for token in tokens[:shown]) + dots


def _byte_lines(found: Explanation) -> Iterator[str]:
    form = "{:<16}{:>7}{:>8}{:>12}{:>14}{:>16}{:>16}"
    yield "Bytes on one rank"
    yield form.format("  pool", "layers", "shards", "row", "a token", "a page", "1 Mi tokens")
    for pool in found.pools:
        counts = pool.num_layers, pool.layout.shards, f"{pool.nbytes:,}"
        yield form.format("  " + pool.name, *counts, *_sizes(found, pool.bytes_per_token))
    yield form.format("  all", "", "", "", *_sizes(found, found.bytes_per_token))


def _sizes(found: Explanation, nbytes: float) -> tuple[str, str, str]:
    return f"{nbytes:,.1f}", f"{nbytes * found.page_tokens:,.0f}", f"{nbytes * MANY_TOKENS:,.0f}"


def _crossing_lines(found: Explanation) -> Iterator[str]:
    if not found.crossings:
        yield "Collectives: none, there is one device"
        return
    yield "Collectives of a decode step of one request, and the bytes that a device receives"
    for c in found.crossings:
        yield f"  {c.where:<11} {c.operation:<22} {c.nbytes:>12,.0f} × {c.times}"
    total = sum(c.nbytes * c.times for c in found.crossings)
    yield f"  {sum(c.times for c in found.crossings)} in all, {total:,.0f} bytes"


# --- picture ------------------------------------------------------------------------------------------------------

_SIDE, _LEFT = 26, 96


def _draw(found: Explanation) -> Picture:
    picture = Picture(f"Owners of the tokens of a page, tp {found.tp} × dcp {found.dcp}")
    head = f"tp {found.tp} × dcp {found.dcp}, pages of {found.page_tokens} tokens, turns of {found.interleave}"
    picture.words(12, 24, head, size=15, bold=True)
    y = 44.0
    latent = found.pools[0].layout
    shown = min(found.page_tokens, 2 * MOST_ROWS)
    picture.words(12, y + 17, "tokens")
    picture.cells(_LEFT, y, _SIDE, ((str(token), colour(latent.owner(token))) for token in range(shown)))
    if shown < found.page_tokens:
        picture.words(_LEFT + shown * _SIDE + 6, y + 17, "…")
    y += _SIDE + 18
    for names, pool in found.alike:
        y = _draw_pool(picture, names, pool, y)
    y = _draw_bytes(picture, found, y)
    _draw_crossings(picture, found, y)
    return picture


def _draw_pool(picture: Picture, names: str, pool: PoolPart, y: float) -> float:
    shards, rows = pool.layout.shards, pool.layout.page_rows
    where = f"in {shards} shards" if shards > 1 else "whole on every rank"
    picture.words(12, y + 12, f"{names}: {where}", bold=True)
    y += 20
    shown = min(rows, MOST_ROWS)
    for rank, tokens in enumerate(pool.tokens):
        picture.words(24, y + 17, f"rank {rank}" if shards > 1 else "each rank")
        fill = colour(rank) if shards > 1 else FAINT
        picture.cells(_LEFT, y, _SIDE, ((str(token), fill) for token in tokens[:shown]))
        if shown < rows:
            picture.words(_LEFT + shown * _SIDE + 6, y + 17, "…")
        y += _SIDE + 3
    return y + 12


def _draw_bytes(picture: Picture, found: Explanation, y: float) -> float:
    """Bars: what a token takes on one rank, and in outline what it would if every rank held all of it."""
    picture.words(12, y + 12, "bytes of a token on one rank (outline: were nothing dealt out)", bold=True)
    y += 20
    scale = 480 / max(pool.num_layers * pool.nbytes for pool in found.pools)
    for pool in found.pools:
        picture.words(12, y + 14, pool.name)
        picture.cell(_LEFT, y, max(1, pool.num_layers * pool.nbytes * scale), 18)
        picture.cell(_LEFT, y, max(1, pool.bytes_per_token * scale), 18, fill=colour(0))
        picture.words(_LEFT + 490, y + 14, f"{pool.bytes_per_token:,.0f}")
        y += 22
    picture.words(_LEFT + 490, y + 14, f"{found.bytes_per_token:,.0f} in all")
    return y + 30


def _draw_crossings(picture: Picture, found: Explanation, y: float) -> None:
    picture.words(12, y + 12, "collectives of a decode step of one request, bytes that a device receives", bold=True)
    if not found.crossings:
        picture.words(24, y + 32, "none")
    for i, c in enumerate(found.crossings):
        picture.words(24, y + 32 + 17 * i, f"{c.where}: {c.operation}, {c.nbytes:,.0f} bytes × {c.times}")
