"""How much of the prompts came from the prefix cache, and where the rest of what could have was lost.

Each admission counts once, however often its lookup was repeated while it waited for pages. Admissions after a
pre-emption are counted apart: their hits are the request's own pages.
"""

import dataclasses
from collections import deque


@dataclasses.dataclass(frozen=True)
class HitCounts:
    """Sums over admissions, in tokens but for `requests`.

    queries: known tokens. hits: those taken over from the cache. lost_last: matched but not taken over, since the last
    token is always computed. lost_rounding: in common with a cached page that differs further on.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    lost_last: int = 0
    lost_rounding: int = 0

    @property
    def shareable(self) -> int:
        """Tokens the cache had, used or not."""
        return self.hits + self.lost_last + self.lost_rounding


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """counts: first admissions. preempted: admissions after a pre-emption. hit_rate: hits over queries of the newest
    requests, pre-emptions left out, 0…1. cached_pages: pages that can be hit now."""

    counts: HitCounts = HitCounts()
    preempted: HitCounts = HitCounts()
    hit_rate: float = 0.0
    cached_pages: int = 0


class HitCounter:
    """Counts admissions; the hit rate is that of the newest `window` requests."""

    def __init__(self, window: int = 1000):
        self.counts = HitCounts()
        self.preempted = HitCounts()
        self._window: deque[tuple[int, int]] = deque()
        self._size = window
        self._queries = self._hits = 0

    def admit(self, queries: int, matched: int, lost_rounding: int, *, again: bool) -> None:
        """One admission of `queries` known tokens, `matched` of them in the cache. again: after a pre-emption."""
        hits = min(matched, queries - 1)
        old = self.preempted if again else self.counts
        new = HitCounts(
            requests=old.requests + 1,
            queries=old.queries + queries,
            hits=old.hits + hits,
            lost_last=old.lost_last + matched - hits,
            lost_rounding=old.lost_rounding + lost_rounding,
        )
        if again:
            self.preempted = new
            return
        self.counts = new
        self._window.append((queries, hits))
        self._queries += queries
        self._hits += hits
        if len(self._window) > self._size:
            queries, hits = self._window.popleft()
            self._queries -= queries
            self._hits -= hits

    def forget(self) -> None:
        """Empties the window; the sums stay."""
        self._window.clear()
        self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        """Hits over queries of the newest requests, 0 … 1; 0 where nothing was asked."""
        return self._hits / self._queries if self._queries else 0.0
