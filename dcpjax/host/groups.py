"""Prefix hits for networks whose layers do not all page their cache alike.

A *group* is the layers with one page geometry: full attention dealt out over ranks or replicated, a sliding window, a
compressed cache. Each group hits on pages of its own; a request can start only where all of them can serve it. This
module says where that is, given *which pages are stored*: it holds no pages itself, so it sits on any index. GLM-5.2
has one geometry and needs none of it.

Sizes, always of what a page holds over all ranks (its *page tokens*), never of what one rank holds::

    hash_tokens      GCD: tokens of one hash; a page's key is the hashes of its tokens, one after another
    schedule_tokens  LCM: a hit is a multiple of it, so that it ends at a page's end in every group
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

from dcpjax.errors import ConfigError

# (name of a group, key of a page of it) → whether that page is stored.
Stored = Callable[[str, bytes], bool]


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers with one page geometry.

    page_rows: cache rows of one page on one rank.
    row_tokens: tokens that one row stands for; above 1 the cache is compressed.
    sharded: whether a page's rows are dealt out over the dcp ranks, or each rank has all tokens.
    window: a query sees this many tokens, its own included; None: all.
    drops: whether a hit leaves out its last matched page. For layers whose rows depend on the token after them, as a
        draft's do: that token may be the first of the next page, which the key does not cover.
    cached: whether the group takes part. One whose rows are kept elsewhere or can be missing does not, and then
        neither limits hits nor enters the sizes.
    """

    name: str
    page_rows: int
    row_tokens: int = 1
    sharded: bool = True
    window: int | None = None
    drops: bool = False
    cached: bool = True

    def __post_init__(self):
        for field in ("page_rows", "row_tokens", "window"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"cache group {self.name!r}: {field} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True)
class Hit:
    """What a request can take over.

    length: tokens; a multiple of the schedule's.
    pages: per group, the page indices of the prompt that it shares; a window needs only the last ones.
    """

    length: int
    pages: tuple[range, ...]


@dataclasses.dataclass(frozen=True)
class CacheGroups:
    """The groups of one network at one dcp size. Raises `ConfigError` if they cannot be cached together.

    prefix_caching: off, every lookup finds nothing and nothing is published; any groups are allowed.
    hash_unit: tokens of one hash, if not the most that are possible; it must divide every group's page tokens.
    wanted_unit: tokens in steps of which hits are expected to grow, for the warning; None: `hash_tokens`.
    """

    groups: tuple[Group, ...]
    dcp: int = 1
    prefix_caching: bool = True
    hash_unit: int | None = None
    wanted_unit: int | None = None

    def __post_init__(self):
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"cache groups: at least one is needed and names must differ, got {names}")
        if self.dcp < 1:
            raise ConfigError(f"dcp size must be at least 1, got {self.dcp}")
        if not self.prefix_caching:
            return
        if not self._cached:
            raise ConfigError(
                f"none of the cache groups {names} takes part in prefix caching: let one, or switch prefix caching off"
            )
        windows = [group.name for group in self._cached if group.window is not None]
        if windows and self.dcp > 1:
            raise ConfigError(
                f"prefix caching with dcp size {self.dcp} is not possible for the sliding-window cache groups "
                f"{windows}: use dcp size 1 or switch prefix caching off (full-attention groups may be sharded or "
                "replicated at any dcp size)"
            )
        for group in self._cached:
            if self.hash_unit is not None and (self.hash_unit < 1 or self.page_tokens(group) % self.hash_unit):
                raise ConfigError(
                    f"hash unit {self.hash_unit} must divide the page of cache group {group.name!r}, "
                    f"{self.page_tokens(group)} tokens over all ranks; {self._gcd} divides every group's"
                )

    def page_tokens(self, group: Group) -> int:
        """Tokens of one page over all ranks: what every size below is made of."""
        return group.page_rows * group.row_tokens * (self.dcp if group.sharded else 1)

    @functools.cached_property
    def schedule_tokens(self) -> int:
        """Hits are multiples of it: the LCM of all pages."""
        return math.lcm(*(self.page_tokens(group) for group in self._cached or self.groups))

    @functools.cached_property
    def hash_tokens(self) -> int:
        """Tokens of one hash: the GCD of all pages, or as set. With caching off nothing is finer than the schedule."""
        if not self.prefix_caching:
            return self.schedule_tokens
        return self.hash_unit or self._gcd

    @property
    def first_hit(self) -> int:
        """The shortest prompt, in tokens, that can hit at all: its last token is computed, and drops need a page."""
        return self.schedule_tokens + max(self._ahead(group) for group in self._cached or self.groups) + 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each, for the log at start."""
        wanted = self.wanted_unit or self.hash_tokens
        if not self.prefix_caching or self.schedule_tokens <= 2 * wanted:
            return ()
        sizes = ", ".join(f"{group.name} {self.page_tokens(group)}" for group in self._cached)
        line = (
            f"prefix hits come in steps of {self.schedule_tokens} tokens, the least common multiple of the cache "
            f"groups' pages ({sizes}), where {wanted} were wanted (hash unit {self.hash_tokens}): prompts under "
            f"{self.first_hit} tokens never hit; choose page sizes that divide one another"
        )
        return (line,)

    def key(self, group: Group, page: int, hashes: Sequence[bytes]) -> bytes:
        """Key of a group's page: the hashes of exactly its tokens, joined. To be stored beside the group's name.

        hashes: one per `hash_tokens` tokens from the prompt's start, each chained to the one before; `ValueError` for
        too few.
        """
        count = self.page_tokens(group) // self.hash_tokens
        if (page + 1) * count > len(hashes):
            raise ValueError(f"page {page} of {group.name!r} takes hashes up to {(page + 1) * count}: {len(hashes)}")
        return b"".join(hashes[page * count : (page + 1) * count])

    def published(self, group: Group, num_tokens: int) -> Iterable[int]:
        """Pages that are worth storing of a sequence with `num_tokens` rows written: all that a lookup may ask for.

        Whole pages of the group's own size, not only those below a multiple of the schedule: the page that a drop
        looks ahead to lies behind such a multiple. Of a window those that no hit can end near are left out.
        """
        if not self.prefix_caching or not group.cached:
            return ()
        whole = range(num_tokens // self.page_tokens(group))
        return whole if group.window is None else (page for page in whole if self._may_be_asked_for(group, page))

    def lookup(self, hashes: Sequence[bytes], num_tokens: int, stored: Stored) -> Hit:
        """The longest hit that every group can serve, at most `num_tokens` − 1.

        num_tokens: known tokens of the request. stored: whether a group has a key.
        hashes: as for `key`, for all whole units of the first `num_tokens` − 1 tokens at least; `ValueError` for fewer.

        Groups lower a candidate length in turn until all can serve it. What a drop looks ahead to follows from the
        candidate, so it is one page per length, however often a group is asked. The prefix of a full-attention hit is
        a hit: those groups are asked once. A window's is not, so windows go round again whenever one lowered it.
        """
        most = max(num_tokens - 1, 0)
        if not self.prefix_caching:
            return self._hit(0)
        if len(hashes) < most // self.hash_tokens:
            raise ValueError(f"{len(hashes)} hashes given, {most // self.hash_tokens} needed for {num_tokens} tokens")

        length = self._aligned(most)
        for group in self._cached:
            if group.window is None:
                length = self._serve_all(group, length, most, hashes, stored)
        windows = [group for group in self._cached if group.window is not None]
        agreed = 0  # windows in a row that can serve `length`
        while windows and length and agreed < len(windows):
            served = self._serve_window(windows[0], length, most, hashes, stored)
            agreed = agreed + 1 if served == length else 1
            length = served
            windows.append(windows.pop(0))
        return self._hit(length)

    def _serve_all(self, group: Group, length: int, most: int, hashes: Sequence[bytes], stored: Stored) -> int:
        """The longest hit up to `length` by the pages from the prompt's start on."""
        size, ahead = self.page_tokens(group), self._ahead(group)
        found, end = 0, min(length + ahead, most) // size
        while found < end and stored(group.name, self.key(group, found, hashes)):
            found += 1
        return min(length, self._aligned(found * size - ahead))

    def _serve_window(self, group: Group, length: int, most: int, hashes: Sequence[bytes], stored: Stored) -> int:
        """The longest hit up to `length` whose last pages, as far as the window reaches, are there."""
        size, ahead = self.page_tokens(group), self._ahead(group)
        while length:
            for page in reversed(self._asked(group, length)):
                known = (page + 1) * size <= most
                if not (known and stored(group.name, self.key(group, page, hashes))):
                    length = self._aligned(page * size - ahead)  # the longest that does not ask for this page
                    break
            else:
                return length
        return 0

    @functools.cached_property
    def _cached(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if group.cached)

    @property
    def _gcd(self) -> int:
        return math.gcd(*(self.page_tokens(group) for group in self._cached))

    def _ahead(self, group: Group) -> int:
        """Tokens behind a hit that must be stored too, because the page with them is dropped."""
        return self.page_tokens(group) if group.drops else 0

    def _aligned(self, length: int) -> int:
        return max(length, 0) // self.schedule_tokens * self.schedule_tokens

    def _kept(self, group: Group, length: int) -> range:
        """Pages that a request takes over on a hit of `length` > 0: the query at `length` sees `window` − 1 of them."""
        size = self.page_tokens(group)
        first = 0 if group.window is None else max(length - group.window + 1, 0) // size
        return range(first, length // size)

    def _asked(self, group: Group, length: int) -> range:
        """Those, and the one that is dropped."""
        kept = self._kept(group, length)
        return range(kept.start, kept.stop + group.drops)

    def _may_be_asked_for(self, group: Group, page: int) -> bool:
        """Whether a hit of some length asks for this page: the next possible one behind it or, ahead, the one at it."""
        size, schedule = self.page_tokens(group), self.schedule_tokens
        behind = -(-(page + 1) * size // schedule) * schedule
        at = page * size
        return page in self._asked(group, behind) or (at > 0 and at % schedule == 0 and page in self._asked(group, at))

    def _hit(self, length: int) -> Hit:
        empty = range(0)
        return Hit(length, tuple(self._kept(g, length) if length and g.cached else empty for g in self.groups))
