"""The prefix cache: which pages hold the first tokens of a new sequence.

Cached contents form a tree: a node is one page's content after its parent's. The pages stay where the pool has them,
used or free; a node is found by its key and trusted only when the tokens on its path are the sequence's own.
"""

import bisect
from collections.abc import Sequence

from dcpjax.host.events import Cleared, EventLog, Removed, Stored
from dcpjax.host.keys import TOKEN_BYTES, Hash, KeyScheme, PageKeys, sha256

Context = tuple[str | None, str | None]  # adapter and salt


class Node:
    """One content: the pages that hold it, and the contents that follow it.

    page: the oldest copy. copies: the younger ones, oldest first. children: contents of the child nodes, sorted, so that
    the nearest is found quickly. A root has no parent and no page, and an adapter and a salt for a key.
    """

    __slots__ = ("children", "content", "copies", "key", "page", "parent")

    def __init__(self, key: bytes | Context, content: bytes, parent: "Node | None", page: int):
        self.key, self.content, self.parent, self.page = key, content, parent, page
        self.copies: list[int] = []
        self.children: list[bytes] = []


class PrefixCache:
    """Pages by what they hold. It never holds a reference: the pool tells it when a page is taken for something else.

    num_pages, page_tokens: the pool's. model, seed, hash: see `KeyScheme`. events: where changes are told.

    A page is cached only while the page before it in its sequence is. For who gives pages back gives the last one back
    first, so the pool hands a tail out before its head; and who shares a page shares all before it.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        model: str = "",
        seed: str = "",
        hash: Hash = sha256,
        events: EventLog | None = None,
    ):
        self.scheme = KeyScheme(page_tokens, model, seed, hash)
        self.by_page: list[Node | None] = [None] * num_pages
        self.num_cached = 0  # pages
        self._events = events
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[Context, Node] = {}  # those with children

    def __contains__(self, key: bytes) -> bool:
        """Whether a page with this key can be hit."""
        return key in self._nodes

    def lookup(self, keys: PageKeys) -> list[int]:
        """Pages that hold the sequence's first tokens: as many whole pages as there are, the oldest copy of each."""
        nodes, wanted = self._nodes, keys.keys
        # Cached pages come first, so how many there are is found by halving, and the last one's parents are the others.
        count = bisect.bisect_left(wanted, True, key=lambda key: key not in nodes)
        if count == 0:
            return []
        node, pages, contents = nodes[wanted[count - 1]], [], []
        while (parent := node.parent) is not None:
            pages.append(node.page)
            contents.append(node.content)
            node = parent
        pages.reverse()
        contents.reverse()
        if node is self._roots.get((keys.adapter, keys.salt)) and contents == keys.contents[:count]:
            return pages
        return self._walk(keys)

    def publish(self, keys: PageKeys, pages: Sequence[int], start: int, stop: int) -> int:
        """Lets pages `start … stop − 1` of a sequence be hit; those before `start` can be. All must be whole.

        Returns how many of the sequence's pages can be hit now: less than `stop` only if a key is already that of
        another content, which then keeps it.
        """
        parent = self.by_page[pages[start - 1]] if start else self._root(keys)
        first_new = stop
        for i in range(start, stop):
            key, content, page = keys.keys[i], keys.contents[i], pages[i]
            node = self._nodes.get(key)
            if node is None:
                node = self._add(key, content, parent, page)
                first_new = min(first_new, i)
            elif node.parent is parent and node.content == content:
                node.copies.append(page)
            else:
                stop = i
                break
            assert self.by_page[page] is None, f"page {page} holds two contents"
            self.by_page[page] = node
            self.num_cached += 1
            parent = node
        if self._events is not None and first_new < stop:
            self._events.add(
                Stored(
                    keys=tuple(keys.keys[first_new:stop]),
                    parent=keys.keys[first_new - 1] if first_new else None,
                    contents=tuple(keys.contents[first_new:stop]),
                    page_tokens=self.scheme.page_tokens,
                    adapter=keys.adapter,
                    salt=keys.salt,
                )
            )
        return stop

    def evict(self, page: int) -> None:
        """The pool hands the page out as a new one: what it held is gone, unless there is another copy."""
        node, self.by_page[page] = self.by_page[page], None
        self.num_cached -= 1
        if node.page != page:
            node.copies.remove(page)
        elif node.copies:
            node.page = node.copies.pop(0)
        else:
            self._remove(node)

    def clear(self) -> None:
        """Forgets all contents. Whoever still uses pages must publish nothing more of its sequence: the pages before
        it are not known any more."""
        self.by_page[:] = [None] * len(self.by_page)
        self.num_cached = 0
        self._nodes.clear()
        self._roots.clear()
        if self._events is not None:
            self._events.add(Cleared())

    def common(self, keys: PageKeys, pages: Sequence[int]) -> int:
        """Tokens after the hit `pages` that some cached page has too, before it differs: what whole pages lose."""
        node = self.by_page[pages[-1]] if pages else self._roots.get((keys.adapter, keys.salt))
        content = keys.contents[len(pages)] if len(pages) < len(keys.contents) else keys.tail
        if node is None or not content:
            return 0
        # Of sorted strings, the two around the place of another one share most with it.
        place = bisect.bisect_left(node.children, content)
        return max((_common(content, child) for child in node.children[max(place - 1, 0) : place + 1]), default=0)

    def check(self) -> None:
        """Asserts that pages, nodes and roots say the same. O(pages); for tests."""
        held: dict[Node, list[int]] = {}
        for page, node in enumerate(self.by_page):
            if node is not None:
                held.setdefault(node, []).append(page)
        assert self.num_cached == sum(len(pages) for pages in held.values())
        assert set(self._nodes.values()) == set(held)
        children: dict[Node, list[bytes]] = {}
        for key, node in self._nodes.items():
            assert node.key == key and sorted([node.page, *node.copies]) == held[node], "copies differ"
            parent = node.parent
            assert self._nodes.get(parent.key) is parent if parent.parent else parent in self._roots.values(), "orphan"
            children.setdefault(parent, []).append(node.content)
        for node in (*self._nodes.values(), *self._roots.values()):
            assert node.children == sorted(children.get(node, [])), "children differ"
        assert all(root.children for root in self._roots.values()), "a root without children"

    def _walk(self, keys: PageKeys) -> list[int]:
        """The lookup for a hash that gives different contents one key: page by page, as far as the tokens agree."""
        parent, pages = self._roots.get((keys.adapter, keys.salt)), []
        for key, content in zip(keys.keys, keys.contents, strict=True):
            node = self._nodes.get(key)
            if node is None or node.parent is not parent or node.content != content:
                break
            pages.append(node.page)
            parent = node
        return pages

    def _root(self, keys: PageKeys) -> Node:
        context = (keys.adapter, keys.salt)
        return self._roots.get(context) or Node(context, b"", None, 0)

    def _add(self, key: bytes, content: bytes, parent: Node, page: int) -> Node:
        node = self._nodes[key] = Node(key, content, parent, page)
        bisect.insort(parent.children, content)
        if parent.parent is None:
            self._roots[parent.key] = parent
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        del self._nodes[node.key]
        del parent.children[bisect.bisect_left(parent.children, node.content)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]
        if self._events is not None:
            self._events.add(Removed((node.key,)))


def _common(a: bytes, b: bytes) -> int:
    """Tokens that two contents have in common from the start."""
    size = min(len(a), len(b))
    low, high = 0, size // TOKEN_BYTES
    while low < high:  # the most tokens that are equal, by halving
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
