"""The prefix cache over its pool, without a scheduler: what is found, what is lost, what is told."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.host.events import Cleared, EventLog, Removed, Stored
from dcpjax.host.hits import HitCounter, HitCounts
from dcpjax.host.pages import PagePool
from dcpjax.host.prefix import PrefixCache
from tests.engine.fake_runner import Replay


class Bench:
    """A cache and its pool, with sequences that are written, held and given back."""

    def __init__(self, num_pages=33, page_tokens=4, **options):
        self.events = EventLog()
        self.cache = PrefixCache(num_pages=num_pages, page_tokens=page_tokens, events=self.events, **options)
        self.pool = PagePool(num_pages, self.cache)
        self.replay = Replay()
        self.tables = []

    def keys(self, tokens, adapter=None, salt=None):
        keys = self.cache.scheme.start(adapter, salt)
        keys.extend(tokens)
        return keys

    def hold(self, tokens, *, share=True, **who):
        """Pages of a sequence: those it hits, then new ones; None if there are too few. All whole ones published."""
        keys = self.keys(tokens, **who)
        hit = self.cache.lookup(keys) if share else []
        new = self.pool.take(-(-len(tokens) // self.cache.scheme.page_tokens) - len(hit), share=hit)
        if new is None:
            return None
        table = hit + new
        self.cache.publish(keys, table, len(hit), len(keys.keys))
        self.tables.append(table)
        return table

    def drop(self, table):
        self.tables.remove(table)
        self.pool.retire(table, 0)

    def check(self):
        self.cache.check()
        self.pool.check(self.tables)
        self.replay.apply(self.events.drain())
        assert self.replay.keys == self.cache._nodes.keys()


def test_whole_pages_are_found_and_no_others():
    bench = Bench()
    table = bench.hold(range(11))
    assert bench.cache.num_cached == 2
    for n, want in ((3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (30, 2)):
        assert bench.cache.lookup(bench.keys(range(n))) == table[:want]
    assert bench.cache.lookup(bench.keys([0, 1, 2, 9, 4, 5, 6, 7])) == []
    assert bench.cache.lookup(bench.keys([4, 5, 6, 7])) == [], "equal tokens elsewhere are another content"
    bench.drop(table)
    assert bench.cache.lookup(bench.keys(range(11))) == table[:2], "free pages keep their content"
    bench.check()


@pytest.mark.parametrize(("page_tokens", "want"), [(16, 144), (32, 128)])
def test_inv_27_br_08_no_more_than_what_is_equal(page_tokens, want):
    """150 equal tokens, then others."""
    bench = Bench(num_pages=64, page_tokens=page_tokens)
    bench.hold(list(range(150)) + [1] * 100)
    keys = bench.keys(list(range(150)) + [2] * 100)
    hit = bench.cache.lookup(keys)
    assert len(hit) * page_tokens == want
    assert bench.cache.common(keys, hit) == 150 - want


def test_inv_28_a_tail_is_evicted_before_its_head():
    bench = Bench(num_pages=8)
    old = bench.hold(range(16))
    assert old == [1, 2, 3, 4]
    bench.drop(old)
    others = [bench.hold([100 + i] * 4) for i in range(3)]
    assert others == [[5], [6], [7]] and bench.cache.lookup(bench.keys(range(16))) == [1, 2, 3, 4]
    assert bench.hold([200] * 4) == [4]
    assert bench.cache.lookup(bench.keys(range(16))) == [1, 2, 3]
    bench.check()


def test_pages_without_content_are_taken_before_any_content_is_lost():
    bench = Bench(num_pages=6)
    table = bench.hold(range(10))
    bench.drop(table)
    assert bench.pool.take(3) == [3, 4, 5] and bench.cache.num_cached == 2
    bench.pool.retire([3, 4, 5], 0)
    bench.check()


def test_duplicates_keep_their_pages_and_the_oldest_is_found():
    """Two compute the same at once. `removed` is told when the last copy goes."""
    bench = Bench(num_pages=8)
    first, second = bench.hold(range(8)), bench.hold(range(8), share=False)
    third = bench.hold(range(4), share=False)
    assert len({*first, *second, *third}) == 5 and bench.cache.num_cached == 5
    assert bench.cache.lookup(bench.keys(range(8))) == first
    assert [type(event) for event in bench.events._events] == [Stored], "the others tell nothing new"
    bench.check()
    bench.drop(first)
    other = bench.hold([50] * 16)
    assert set(other) == {6, 7, *first}, "first's pages went"
    assert bench.cache.lookup(bench.keys(range(8))) == second
    bench.check()
    bench.drop(second)
    bench.drop(third)
    bench.check()
    # Free: 2nd page of `second`, its 1st, and `third`, the last copy of the first content.
    for left in ([second[0]], [third[0]], []):
        bench.hold([60 + len(bench.tables)] * 4)
        assert bench.cache.lookup(bench.keys(range(8))) == left
        bench.check()


def always(data):
    return b"same"


@pytest.mark.parametrize("digest", [always, lambda data: data[-4:], lambda data: bytes([sum(data) % 3])])
def test_a_hash_that_collides_gives_no_wrong_hit(digest):
    """Every hit is confirmed by the tokens on its path, its adapter and its salt. Some hits are missed, no more."""
    rng = random.Random(1)
    bench = Bench(num_pages=24, page_tokens=2, hash=digest)
    held, hits = {}, 0
    for _ in range(600):
        who = {"salt": rng.choice([None, "a"]), "adapter": rng.choice([None, "a"])}
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        keys = bench.keys(tokens, **who)
        hit = bench.cache.lookup(keys)
        hits += len(hit)
        for i, page in enumerate(hit):
            assert held[page] == (who, tokens[: 2 * i + 2])
        table = bench.hold(tokens, **who)
        if table is not None:
            held |= {page: (who, tokens[: 2 * i + 2]) for i, page in enumerate(table)}
        if table is None or rng.random() < 0.5:
            bench.drop(rng.choice(bench.tables))
        bench.check()
    assert hits > 20
    # What a collision keeps out of the cache is not followed by what could never be found.
    bench = Bench(hash=always)
    table = bench.hold(range(12))
    assert bench.cache.lookup(bench.keys(range(12))) == table[:1] and bench.cache.num_cached == 1
    assert bench.cache.lookup(bench.keys([4, 5, 6, 7])) == []
    bench.check()


OPERATIONS = st.tuples(
    st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from([None, "a", "b"])
)


@given(st.integers(4, 12), st.lists(OPERATIONS, max_size=40))
def test_inv_21_22_33_conservation_soundness_and_replay(num_pages, operations):
    """Two letters and pages of two tokens: every sequence nearly collides with the others."""
    bench, held = Bench(num_pages=num_pages, page_tokens=2), {}
    for kind, tokens, salt in operations:
        if kind == 0 and bench.tables:
            bench.drop(bench.tables[len(tokens) % len(bench.tables)])
        else:
            for i, page in enumerate(bench.cache.lookup(bench.keys(tokens, salt=salt))):
                assert held[page] == (salt, tokens[: 2 * i + 2])
            table = bench.hold(tokens, salt=salt, share=kind == 1)
            if table is not None:
                held |= {page: (salt, tokens[: 2 * i + 2]) for i, page in enumerate(table)}
        bench.check()
        assert bench.pool.num_used + bench.pool.num_free == num_pages - 1


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=12), st.integers(1, 4))
def test_inv_25_the_longest_hit_and_the_longest_common_part(sequences, page_tokens):
    """Compared with all earlier sequences, one by one. Nothing is evicted."""
    bench, seen = Bench(num_pages=300, page_tokens=page_tokens), []
    for tokens in sequences:
        same = [next((i for i, (a, b) in enumerate(zip(s, tokens)) if a != b), min(len(s), len(tokens))) for s in seen]
        whole = max((n // page_tokens for n in same), default=0)
        keys = bench.keys(tokens)
        hit = bench.cache.lookup(keys)
        assert len(hit) == whole
        # Cached pages end with whole pages; partial ones are in common with nobody.
        cached = [min(n, len(s) // page_tokens * page_tokens) for n, s in zip(same, seen)]
        assert bench.cache.common(keys, hit) == max([n - whole * page_tokens for n in cached], default=0)
        bench.hold(tokens)
        seen.append(tokens)


def test_inv_33_events_say_what_a_router_needs():
    bench = Bench(page_tokens=2)
    table = bench.hold([1, 2, 3, 4, 5], salt="s", adapter="a")
    bench.hold([1, 2, 3, 4, 9, 9], salt="s", adapter="a")
    one, two = bench.events.drain()
    assert bench.events.drain() == []
    assert (one.tokens, one.parent, one.page_tokens, one.group) == ((1, 2, 3, 4), None, 2, 0)
    assert (one.adapter, one.salt) == ("a", "s")
    assert two.tokens == (9, 9) and two.parent == one.keys[1] and len(two.keys) == 1
    assert all(key in bench.cache for key in (*one.keys, *two.keys))
    bench.drop(table)
    assert bench.events.drain() == [], "content is lost when its page is taken, not when it is given back"


def test_inv_33_only_what_is_new_is_told():
    """A copy of a cached page, then a page that follows it."""
    bench = Bench(page_tokens=2)
    bench.hold([1, 2, 3, 4])
    (first,) = bench.events.drain()
    bench.hold([1, 2, 3, 4, 5, 6, 7, 8], share=False)
    (second,) = bench.events.drain()
    assert second.tokens == (5, 6, 7, 8) and second.parent == first.keys[1]
    bench.hold([1, 2, 3, 4, 5, 6, 7, 8], share=False)
    assert bench.events.drain() == []


def test_inv_32_reset():
    bench = Bench()
    bench.drop(bench.hold(range(40)))
    free = list(bench.pool._free)
    bench.check()
    bench.cache.clear()
    assert bench.events._events == [Cleared()]
    assert bench.cache.num_cached == 0 and bench.cache.lookup(bench.keys(range(40))) == []
    bench.check()
    assert list(bench.pool._free) == free and bench.replay.num_cleared == 1
    bench.hold(range(40))
    bench.check()


def test_a_removed_event_names_its_key():
    bench = Bench(num_pages=2)
    bench.drop(bench.hold(range(4)))
    (stored,) = bench.events.drain()
    bench.pool.take(1)
    assert bench.events.drain() == [Removed(stored.keys)]


def test_long_sequences_are_let_go_without_deep_recursion():
    bench = Bench(num_pages=200_002, page_tokens=1)
    table = bench.hold(range(200_000))
    assert len(bench.cache.lookup(bench.keys(range(200_000)))) == 200_000
    bench.drop(table)
    bench.cache.clear()
    assert bench.cache.num_cached == 0


def test_inv_34_hit_rate_of_the_newest_requests():
    counter = HitCounter(window=3)
    assert counter.hit_rate == 0
    for queries, matched in ((10, 4), (10, 8), (8, 8)):
        counter.admit(queries, matched, lost_rounding=1, again=False)
    assert counter.counts == HitCounts(requests=3, queries=28, hits=19, lost_last=1, lost_rounding=3)
    assert counter.counts.shareable == 23 and counter.hit_rate == 19 / 28
    counter.admit(1000, 1000, 0, again=True)
    assert counter.hit_rate == 19 / 28, "what comes back after a pre-emption is not counted"
    assert counter.preempted == HitCounts(requests=1, queries=1000, hits=999, lost_last=1)
    counter.admit(12, 0, 0, again=False)
    assert counter.hit_rate == 15 / 30, "the oldest fell out"
    counter.forget()
    assert counter.hit_rate == 0 and counter.counts.requests == 4
