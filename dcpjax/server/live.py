"""`/`, a page that shows the engine at work, and `/live`, the stream of snapshots that feeds it.

The page is one static file without outside resources. Both are endpoints for developers: `--enable-dev-endpoints`.
"""

import asyncio
import collections
import json
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import dcpjax
from dcpjax.engine import EngineCore
from dcpjax.server.engine_side import EngineSide
from dcpjax.server.errors import ApiError
from dcpjax.server.service import Phase, Service

_PAGE = pathlib.Path(__file__).parent / "static" / "live.html"
# Nothing but the page's own style and script, and no connections but to this server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECONDS = 0.5
# Pages that are shown one by one; of a larger pool, neighbours share a cell.
MOST_CELLS = 1024
FREE, CACHED, USED, SHARED = "fcus"


def page() -> Response:
    """`GET /`: the page. It needs no key: what it shows comes from `/live`, which does."""
    return Response(
        _PAGE.read_bytes(),
        media_type="text/html",
        headers={"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"},
    )


def feed(request: Request, service: Service) -> Response:
    """One JSON object a line: what stays as it is, then a snapshot twice a second for as long as somebody reads.

    `?count=N` ends it after N snapshots. Raises `ApiError`.
    """
    served = service.served
    count = _count(request.query_params.get("count"))
    arguments = json.loads(service.options.fingerprint or "{}")

    async def lines() -> AsyncIterator[bytes]:
        yield _line(
            {
                "version": dcpjax.__version__,
                "model": served.name,
                "tp": service.options.parallelism[0] // service.options.parallelism[1],
                "dcp": service.options.parallelism[1],
                "interleave": arguments.get("cp_kv_cache_interleave_size") or 1,
                **await served.engine.ask_aside(_sizes),
            }
        )
        sent = 0
        while service.phase is Phase.READY and (count is None or sent < count):
            yield _line(await served.engine.ask(_snapshot))
            sent += 1
            if sent != count:
                await asyncio.sleep(_SECONDS)

    return StreamingResponse(
        lines(), media_type="application/x-ndjson", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


def _count(given: str | None) -> int | None:
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and 0 < len(given) < 10 and int(given) > 0):
        raise ApiError(400, f"count: got {given!r:.200}, it must be a whole number above 0", "count")
    return int(given)


# To be asked of the engine process.


def _sizes(side: EngineSide) -> dict[str, int]:
    engine = side.engine
    return {
        "page_tokens": engine.scheduler.page_tokens,
        "num_pages": engine.scheduler.pool.capacity,
        "num_drafts": len(engine.stats.acceptance.verified),
    }


def _snapshot(side: EngineSide) -> dict[str, Any]:
    return snapshot(side.engine)


def snapshot(engine: EngineCore) -> dict[str, Any]:
    """Counters, sums since the start, and the state of every page. To be taken between two steps."""
    stats = engine.stats
    hits = stats.prefix.counts
    return {
        "time": time.monotonic(),
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "verified": stats.acceptance.verified,
        "accepted": stats.acceptance.accepted,
        "seconds": stats.seconds,
        "hits": {
            "queries": hits.queries,
            "hits": hits.hits,
            "lost_last": hits.lost_last,
            "lost_rounding": hits.lost_rounding,
            "rate": stats.prefix.hit_rate,
        },
        "pages": pages(engine),
    }


def pages(engine: EngineCore, most: int = MOST_CELLS) -> dict[str, Any]:
    """States of pages 1, 2, …, `per_cell` of them in a cell, which shows the busiest one's state.

    cells: a letter each: f(ree), c(ached: free, with content that can be hit), u(sed), s(hared by several tables).
    counts: of pages, by letter. filled: pairs of a cell and the tokens in it, for pages in use that are not full; only
    where a cell is a page.
    """
    scheduler = engine.scheduler
    holders = scheduler.pool.holders
    cached = scheduler.prefix.by_page if scheduler.prefix is not None else [None] * len(holders)
    states = [
        SHARED if held > 1 else USED if held else FREE if content is None else CACHED
        for held, content in zip(holders[1:], cached[1:], strict=True)
    ]
    per_cell = -(-len(states) // most)
    rank = "fcus".index
    cells = [max(states[i : i + per_cell], key=rank) for i in range(0, len(states), per_cell)]
    filled = {}
    if per_cell == 1:
        size = scheduler.page_tokens
        for request in scheduler.running:
            for i, page in enumerate(request.pages):
                tokens = min(max(request.written - i * size, 0), size)
                if tokens < size:
                    filled[page - 1] = tokens
    counts = collections.Counter(states)
    return {
        "per_cell": per_cell,
        "cells": "".join(cells),
        "counts": {state: counts[state] for state in "fcus"},
        "filled": sorted(filled.items()),
    }


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"
