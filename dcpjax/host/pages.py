"""The pool of pages: who may write which page, counted in whole logical pages.

One id names the same page in every cache array on every rank, so one pool serves target and draft, latent rows and
index keys. A page is *used* (held by tables, or given back while a step that may write it is in flight) or *free*. A
free page whose content is cached keeps it until the page is handed out as a new one: the free list is the LRU.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from dcpjax.errors import ConfigError


class Contents(Protocol):
    """What pages hold, as far as somebody may ask for it again."""

    by_page: Sequence[object | None]  # [num_pages], changed in place; None: nothing worth keeping

    def evict(self, page: int) -> None:
        """The page is handed out as a new one; sets `by_page[page]` to None."""
        ...


class PagePool:
    """Pages 1 … num_pages − 1; page 0 is the dummy that absorbs padding and is never given out.

    contents: what is cached, such as a `PrefixCache`; None: nothing is. Raises `ConfigError` for fewer than 2 pages, or
    if `contents` is about another number of them.

    Every operation is O(1) per page, and order is fixed: the same calls give the same ids on every host process.
    Steps are numbered by *epochs*, 1, 2, …: `retire` names the newest step that may still write a page, and the page is
    free once `settle` says that this step's output was read.
    """

    def __init__(self, num_pages: int, contents: Contents | None = None):
        if num_pages < 2:
            raise ConfigError(f"num_pages: got {num_pages}, at least 2 are needed, the dummy page and one to write to")
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        # Taken from the front. A page with cached content is given back at the back, so that the one unused for longest
        # goes first; others at the front, before any content is lost. Ordered by a linked list, so that one in the
        # middle can leave when a later request shares it.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self._num_retiring = 0
        self._settled = 0
        self._contents = contents
        self._cached = [None] * num_pages if contents is None else contents.by_page
        if len(self._cached) != num_pages:
            raise ConfigError(f"contents: of {len(self._cached)} pages, but the pool has {num_pages}")

    @property
    def capacity(self) -> int:
        """Pages that can be held at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that cannot."""
        return self.capacity - len(self._free)

    @property
    def holders(self) -> Sequence[int]:
        """How many tables hold each page, by id; a page whose last table is given up counts until its step is read."""
        return tuple(self._refs)

    @property
    def num_retiring(self) -> int:
        """References that end once the steps in flight are read; at most so many pages come free then."""
        return self._num_retiring

    def take(self, n: int, *, share: Sequence[int] = (), leave: int = 0) -> list[int] | None:
        """Takes `n` new pages and one more reference to each page of `share`; all of it, or None and no change.

        `leave`: how many pages must be free afterwards. Shared pages that are free stop being so, and count; they are
        referenced before new ones are taken, so none of them is handed out as new.
        """
        refs, free, cached = self._refs, self._free, self._cached
        if n + leave + len(share) > len(free):  # else it fits even if all shared pages are free ones
            revived = sum(1 for page in share if refs[page] == 0)
            if n + revived + leave > len(free):
                return None
        for page in share:
            if held := refs[page]:
                refs[page] = held + 1
            else:
                refs[page] = 1
                del free[page]
        taken = [free.popitem(last=False)[0] for _ in range(n)]
        for page in taken:
            refs[page] = 1
            if cached[page] is not None:
                self._contents.evict(page)
        return taken

    def retire(self, pages: Sequence[int], epoch: int) -> None:
        """Ends one reference to each of `pages`, at once if step `epoch` is settled, else when it is.

        Raises `ValueError` for an epoch older than one before, or a page that nobody holds: faults of the caller.
        """
        if self._retiring and epoch < self._retiring[-1][0]:
            raise ValueError(f"epoch: got {epoch}, older than {self._retiring[-1][0]} of pages retired before")
        if epoch <= self._settled:
            self._release(pages)
        elif pages:
            self._retiring.append((epoch, list(pages)))
            self._num_retiring += len(pages)

    def settle(self, epoch: int) -> None:
        """The outputs of all steps up to `epoch` were read: nothing in flight can write what they held."""
        self._settled = max(self._settled, epoch)
        while self._retiring and self._retiring[0][0] <= self._settled:
            _, pages = self._retiring.popleft()
            self._num_retiring -= len(pages)
            self._release(pages)

    def _release(self, pages: Sequence[int]) -> None:
        # Last page first: of one request the tail is reused before the head, which more prompts have in common.
        refs, free, cached = self._refs, self._free, self._cached
        for page in reversed(pages):
            if not 0 < page < self.num_pages or (held := refs[page]) == 0:
                raise ValueError(f"page {page} is given back by somebody who does not hold it")
            refs[page] = held - 1
            if held == 1:
                free[page] = None
                if cached[page] is None:
                    free.move_to_end(page, last=False)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that pages are conserved, given the page lists of all live requests. O(pages)."""
        held = [0] * self.num_pages
        for pages in (*tables, *(pages for _, pages in self._retiring)):
            for page in pages:
                held[page] += 1
        assert held[0] == 0, "the dummy page is held"
        assert held == self._refs, "references differ from the tables"
        assert sorted(self._free) == [p for p in range(1, self.num_pages) if held[p] == 0], "free list differs"
        assert self._num_retiring == sum(len(pages) for _, pages in self._retiring)
