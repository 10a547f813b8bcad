"""Which rank and which row hold cache slot *s*: integer arithmetic, the same code for the host and the device.

A *slot* is a token's place in a cache pool: `page · page_tokens + offset`. Ranks take turns of `interleave` tokens.
One page id names the same page on every rank, which holds `page_tokens / shards` rows of it. Everything about
ownership follows from `owner`, computed from global slots, never from lengths of a rank.
"""

import dataclasses
from typing import Any

from dcpjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Geometry of one pool. `shards` is 1 (every rank holds all rows) or the mesh's dcp size. Static, hashable.

    Raises `ConfigError` where a page is no whole number of turns.

    >>> layout = CacheLayout(num_pages=2, page_tokens=16, shards=4)
    >>> [layout.owner(slot) for slot in range(6)], layout.row(5)
    ([0, 1, 2, 3, 0, 1], 1)
    >>> layout.slot(row=1, rank=1), layout.local_len(6, rank=1), layout.local_len(6, rank=2)
    (5, 2, 1)
    """

    num_pages: int
    page_tokens: int
    shards: int = 1
    interleave: int = 1

    def __post_init__(self):
        turn = self.shards * self.interleave
        if min(self.num_pages, self.page_tokens, self.shards, self.interleave) < 1:
            raise ConfigError(f"a cache layout needs sizes of at least 1, got {self}")
        if self.page_tokens % turn:
            raise ConfigError(
                f"block size {self.page_tokens} must be a multiple of dcp size × interleave = {self.shards} × "
                f"{self.interleave} = {turn}; use a larger block size or a smaller interleave"
            )

    @property
    def page_rows(self) -> int:
        """Rows of one page on one rank."""
        return self.page_tokens // self.shards

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool, over all ranks."""
        return self.num_pages * self.page_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the whole pool on one rank; also the local row that means "not written"."""
        return self.num_pages * self.page_rows

    @property
    def nowhere(self) -> int:
        """The slot that no rank owns. Not −1, which would wrap to the last page."""
        return self.num_slots

    def owner(self, slot: Any) -> Any:
        """Rank that holds `slot`."""
        return (slot // self.interleave) % self.shards

    def row(self, slot: Any) -> Any:
        """Row of `slot` in its owner's pool; `nowhere` gives `num_rows`, one past the end."""
        turn = self.shards * self.interleave
        return (slot // turn) * self.interleave + slot % self.interleave

    def slot(self, row: Any, rank: Any) -> Any:
        """Inverse of `row`: the slot in `row` of `rank`'s pool."""
        turn = self.shards * self.interleave
        return (row // self.interleave) * turn + rank * self.interleave + row % self.interleave

    def local_len(self, length: Any, rank: Any) -> Any:
        """How many of the first `length` tokens of a sequence `rank` holds."""
        turn = self.shards * self.interleave
        rest = length % turn - rank * self.interleave
        # min and max written so that they serve ints, numpy and traced arrays alike
        rest = rest * (rest > 0)
        rest = rest - (rest - self.interleave) * (rest > self.interleave)
        return (length // turn) * self.interleave + rest
