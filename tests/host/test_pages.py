"""The page pool: conservation, order, epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.host.pages import PagePool


def test_the_dummy_page_is_never_given_out():
    pool = PagePool(5)
    assert pool.capacity == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.take(1) is None
    with pytest.raises(ConfigError, match="num_pages: got 1"):
        PagePool(1)


def test_take_is_all_or_nothing():
    pool = PagePool(6)
    assert pool.take(6) is None
    assert pool.take(3, leave=3) is None
    assert pool.num_free == 5
    assert pool.take(3, leave=2) == [1, 2, 3], "a refusal leaves the order as it was"


def test_pages_go_out_in_the_order_they_were_last_used():
    """Those without content first, the newest of them before the others."""
    pool = PagePool(8)
    pages = pool.take(4)
    pool.retire(pages[:2], 0)
    pool.retire(pages[2:], 0)
    assert pool.take(7) == [3, 4, 1, 2, 5, 6, 7]


class Names:
    """Contents of pages, by name."""

    def __init__(self, num_pages):
        self.by_page = [None] * num_pages
        self.evicted = []

    def evict(self, page):
        self.evicted.append(self.by_page[page])
        self.by_page[page] = None


def test_inv_28_eviction_order():
    """Never-used pages first; then the tail of what was given back before its head."""
    names = Names(8)
    pool = PagePool(8, names)
    pages = pool.take(4)
    names.by_page[1:5] = "abcd"
    pool.retire(pages, 0)
    assert names.evicted == [], "content goes when the page is handed out, not before"
    assert pool.take(3) == [5, 6, 7] and names.evicted == []
    assert pool.take(1) == [4] and names.evicted == ["d"]
    assert pool.take(0, share=[1]) == []
    assert pool.take(2) == [3, 2] and names.evicted == ["d", "c", "b"]
    assert names.by_page[1] == "a"


def test_pages_without_content_go_before_those_with():
    names = Names(6)
    pool = PagePool(6, names)
    pages = pool.take(5)
    names.by_page[1], names.by_page[4] = "a", "d"
    pool.retire(pages, 0)
    assert pool.take(5) == [2, 3, 5, 4, 1], "the partial tail first, then tail before head"
    with pytest.raises(ConfigError, match="contents: of 6 pages, but the pool has 7"):
        PagePool(7, names)


def test_retired_pages_come_back_when_their_step_was_read():
    pool = PagePool(4)
    a, b = pool.take(1), pool.take(2)
    pool.retire(a, 1)
    pool.retire(b, 2)
    assert (pool.num_free, pool.num_retiring, pool.num_used) == (0, 3, 3)
    pool.settle(1)
    assert (pool.num_free, pool.num_retiring) == (1, 2)
    assert pool.take(1) == a
    pool.settle(2)
    assert pool.num_free == 2
    pool.retire(a, 2)
    assert pool.num_free == 3, "a step that was read already holds nothing back"


def test_retire_refuses_what_cannot_be():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.retire(pages[:1], 3)
    with pytest.raises(ValueError, match="epoch: got 2"):
        pool.retire(pages[1:], 2)
    pool.settle(3)
    for page in (pages[0], 0, 4):
        with pytest.raises(ValueError, match="does not hold"):
            pool.retire([page], 3)


def test_inv_29_hit_pages_are_safe():
    """Needed − 1 pages are free, the hit ones among them: a refusal changes nothing, not even the order."""
    names = Names(7)
    pool = PagePool(7, names)
    pages = pool.take(4)
    names.by_page[1:5] = "abcd"
    pool.retire(pages, 0)
    before = (list(pool._free), list(pool._refs), list(names.by_page))
    assert before[0] == [5, 6, 4, 3, 2, 1]
    assert pool.take(3, share=[1, 2, 3, 4]) is None
    assert pool.take(2, share=[1, 2, 3], leave=2) is None
    assert (list(pool._free), list(pool._refs), list(names.by_page)) == before and names.evicted == []
    assert pool.take(2, share=[1, 2, 3, 4]) == [5, 6], "referenced before new ones are taken"
    pool.check([[1, 2, 3, 4, 5, 6]])


def test_shared_pages():
    pool = PagePool(6)
    first = pool.take(3)
    assert pool.take(1, share=first[:2]) == [4]
    pool.retire(first, 0)
    pool.check([[1, 2, 4]])
    assert pool.num_free == 2, "pages 3 and 5"
    # Pages that are free stop being so when they are shared, and are not handed out as new in the same breath.
    pool.retire([1, 2, 4], 0)
    assert pool.take(4, share=[5, 2]) is None
    pool.check([])
    assert pool.take(3, share=[5, 2]) == [1, 4, 3]
    pool.check([[5, 2, 1, 4, 3]])


def test_check_finds_a_lost_page():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.check([pages])
    with pytest.raises(AssertionError, match="references"):
        pool.check([pages[:1]])
    with pytest.raises(AssertionError, match="references"):
        pool.check([pages, pages[:1]])


@given(st.integers(2, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_pages_are_conserved(num_pages, operations):
    pool, tables, epoch = PagePool(num_pages), [], 0
    for kind, a, b in operations:
        free = pool.num_free
        if kind == 0:
            pages = pool.take(a, leave=b % 3)
            assert (pages is None) == (a + b % 3 > free)
            tables += [pages] if pages is not None else []
        elif kind == 1 and tables:
            share = tables[a % len(tables)][: b + 1]
            pages = pool.take(b, share=share)
            tables += [share + pages] if pages is not None else []
        elif kind == 2 and tables:
            epoch += b % 2
            pool.retire(tables.pop(a % len(tables)), epoch)
        else:
            pool.settle(max(epoch - b % 3, 0))
        pool.check(tables)
        assert pool.num_used + pool.num_free == num_pages - 1
    for table in tables:
        pool.retire(table, epoch)
    pool.settle(epoch)
    pool.check([])
    assert pool.num_free == num_pages - 1
