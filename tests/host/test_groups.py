"""Cache groups: what other engines count in pages × dcp, and the search for the longest hit against all lengths tried.

The expected numbers are those of engines that give a page back to the draft; this engine's own prefix cache does not.
"""

import hashlib
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.host.groups import CacheGroups, Group
from dcpjax.host.pages import PagePool
from dcpjax.host.prefix import PrefixCache


class Store:
    """An index that keeps every page ever published: the plainest `stored` there can be."""

    def __init__(self, groups: CacheGroups):
        self.groups, self.pages, self.asked = groups, set(), []

    def hashes(self, tokens) -> list[bytes]:
        unit, chain = self.groups.hash_tokens, [b"start"]
        for end in range(unit, len(tokens) + 1, unit):
            part = ",".join(map(str, tokens[end - unit : end]))
            chain.append(hashlib.sha256(chain[-1] + part.encode()).digest())
        return chain[1:]

    def publish(self, tokens, names=None) -> None:
        hashes = self.hashes(tokens)
        for group in self.groups.groups:
            if names is None or group.name in names:
                pages = self.groups.published(group, len(tokens))
                self.pages |= {(group.name, self.groups.key(group, page, hashes)) for page in pages}

    def stored(self, name: str, key: bytes) -> bool:
        self.asked.append((name, key))
        assert len(self.asked) < 100_000, "the search goes round for ever"
        return (name, key) in self.pages

    def lookup(self, tokens):
        self.asked.clear()
        return self.groups.lookup(self.hashes(tokens), len(tokens), self.stored)


def one(rows: int, dcp: int = 1, drops: bool = False) -> CacheGroups:
    """Target and draft in one group, dealt out over the ranks."""
    return CacheGroups((Group("all", rows, drops=drops),), dcp)


def mixed(**more) -> CacheGroups:
    """Pages of 256 for the target, of 64 for a replicated draft."""
    return CacheGroups((Group("target", 64), Group("draft", 64, sharded=False, drops=True)), dcp=4, **more)


def twice(groups: CacheGroups, n: int) -> int:
    """Hit of the second of two equal prompts."""
    store = Store(groups)
    store.publish(range(n))
    return store.lookup(range(n)).length


def after(groups: CacheGroups, shared: int, n: int) -> int:
    """Hit of an n-token prompt whose first tokens were computed before, in a sequence that ended there."""
    store = Store(groups)
    store.publish(range(shared))
    return store.lookup([*range(shared), *range(-1, shared - n - 1, -1)]).length


# Sizes


@pytest.mark.parametrize(
    ("groups", "sizes", "unit", "schedule"),
    [
        (one(64, 4, drops=True), [256], 256, 256),
        (mixed(), [256, 64], 64, 256),
        (one(64), [64], 64, 64),
        (one(128, 8), [1024], 1024, 1024),
        (CacheGroups((Group("a", 192, sharded=False), Group("b", 128)), dcp=4), [192, 512], 64, 1536),
        (CacheGroups((Group("mla", 64), Group("compressed", 16, row_tokens=8)), dcp=2), [128, 256], 128, 256),
        (CacheGroups((Group("mla", 64), Group("swa", 16, window=100))), [64, 16], 16, 64),
    ],
)
def test_inv_26_sizes(groups, sizes, unit, schedule):
    assert [groups.page_tokens(group) for group in groups.groups] == sizes
    assert (groups.hash_tokens, groups.schedule_tokens) == (unit, schedule)
    assert all(size % unit == 0 and schedule % size == 0 for size in sizes)


def test_what_must_divide_is_a_page_over_all_ranks():
    """64 rows a rank are no multiple of 256, the page they make at dcp 4 is."""
    assert CacheGroups((Group("all", 64),), dcp=4, hash_unit=256).hash_tokens == 256
    assert mixed(hash_unit=32).hash_tokens == 32
    with pytest.raises(ConfigError, match="hash unit 256 must divide the page of cache group 'draft', 64 .* 64 div"):
        mixed(hash_unit=256)
    with pytest.raises(ConfigError, match="hash unit 0"):
        mixed(hash_unit=0)


def test_a_smaller_hash_unit_changes_no_hit():
    for n in (1024, 1025, 1089):
        assert twice(mixed(hash_unit=16), n) == twice(mixed(), n)


def test_br_22_hits_in_large_steps_are_announced():
    coarse = CacheGroups((Group("a", 4096), Group("b", 2)))
    assert (coarse.schedule_tokens, coarse.hash_tokens) == (4096, 2)
    (line,) = coarse.warnings
    assert "4096" in line and "hash unit 2" in line and "a 4096, b 2" in line
    sizes = (128, 4096, 32, 2, 8)
    five = CacheGroups(tuple(Group(str(size), size) for size in sizes), wanted_unit=128)
    assert five.schedule_tokens == 4096 and "128 were wanted" in five.warnings[0]
    assert twice(five, 4096) == 0 and twice(five, five.first_hit) == 4096
    # Twice the unit wanted is still fine; so is no caching.
    assert CacheGroups(coarse.groups, wanted_unit=2048).warnings == ()
    assert len(CacheGroups(coarse.groups, wanted_unit=2047).warnings) == 1
    assert CacheGroups(coarse.groups, prefix_caching=False).warnings == ()
    assert one(64, 4).warnings == ()


# One group

PROMPTS = (256, 257, 512, 513, 1024, 1025, 2048, 2049, 16384, 52445)


@pytest.mark.parametrize(
    ("rows", "dcp", "drops", "hits"),
    [
        (64, 1, False, (192, 256, 448, 512, 960, 1024, 1984, 2048, 16320, 52416)),
        (64, 1, True, (128, 192, 384, 448, 896, 960, 1920, 1984, 16256, 52352)),
        (64, 4, False, (0, 256, 256, 512, 768, 1024, 1792, 2048, 16128, 52224)),
        (64, 4, True, (0, 0, 0, 256, 512, 768, 1536, 1792, 15872, 51968)),
        (128, 8, True, (0, 0, 0, 0, 0, 0, 0, 1024, 14336, 51200)),
    ],
)
def test_the_same_prompt_twice(rows, dcp, drops, hits):
    assert tuple(twice(one(rows, dcp, drops), n) for n in PROMPTS) == hits
    page = rows * dcp
    assert hits == tuple(max(0, (n - 1) // page - drops) * page for n in PROMPTS)


def test_units_that_users_measured():
    assert twice(one(64, 4, drops=True), 52_445) == 51_968
    assert twice(one(2304, drops=True), 10_355) == 6_912


@pytest.mark.parametrize(("groups", "first"), [(one(64, 4, drops=True), 513), (one(64, 4), 257), (mixed(), 321)])
def test_the_first_prompt_that_hits(groups, first):
    assert groups.first_hit == first
    assert twice(groups, first - 1) == 0 < twice(groups, first)


def test_br_01_a_prompt_twice_with_a_sharded_draft():
    assert twice(one(64, 4, drops=True), 1025) == 768


def test_br_02_a_long_shared_part():
    store = Store(one(64, 4, drops=True))
    store.publish(range(16_384 + 100))
    assert store.lookup([*range(16_384), *range(-100, 0)]).length == 16_128


def test_br_02_a_group_that_takes_no_part_limits_nobody():
    aside = Group("aside", 48, sharded=False, cached=False)
    groups = CacheGroups((aside, *one(64, 4, drops=True).groups), dcp=4)
    assert (groups.hash_tokens, groups.schedule_tokens) == (256, 256)
    store = Store(groups)
    store.publish(range(1025))
    hit = store.lookup(range(1025))
    assert hit.length == 768 and hit.pages == (range(0), range(3))
    assert {name for name, _ in store.pages} == {"all"} and not list(groups.published(aside, 1000))


@pytest.mark.parametrize(("n", "drops", "hit"), [(1025, False, 1024), (1025, True, 0), (2049, True, 1024)])
def test_br_03_large_pages(n, drops, hit):
    assert twice(one(128, 8, drops), n) == hit


def test_br_08_inv_27_a_coarse_page_has_the_hashes_of_its_own_tokens():
    first = list(range(600))
    second = first[:150] + [-token for token in first[150:]]
    fine = CacheGroups((Group("all", 16),), dcp=2, hash_unit=16)
    both = CacheGroups((Group("coarse", 16), Group("fine", 16, sharded=False)), dcp=2)
    for groups in (one(16, 2), fine, both):
        store = Store(groups)
        store.publish(first)
        assert store.lookup(first).length == 576
        assert store.lookup(second).length == 128
    hashes = Store(both).hashes(first)
    assert both.key(both.groups[0], 1, hashes) == hashes[2] + hashes[3]
    assert both.key(both.groups[1], 1, hashes) == hashes[1]


def test_br_15_only_flagged_groups_drop():
    assert twice(one(192, 8), 13_825) == 13_824
    assert twice(one(192, 8, drops=True), 13_825) == 12_288
    # The draft's rows are kept outside: flagged, and of no account.
    draft = Group("draft", 192, sharded=False, drops=True, cached=False)
    assert twice(CacheGroups((Group("target", 192), draft), dcp=8), 13_825) == 13_824


def test_it_sits_on_the_prefix_cache():
    """Asked by key, the engine's own index answers; it could give all whole pages, others keep one back, or two."""
    cache = PrefixCache(num_pages=9, page_tokens=16)
    pool = PagePool(9, cache)
    keys = cache.scheme.start()
    keys.extend(range(96))
    pages = pool.take(6)
    cache.publish(keys, pages, 0, 6)
    assert len(cache.lookup(keys)) == 6
    for drops, hit in ((False, 80), (True, 64)):
        assert one(16, drops=drops).lookup(keys.keys, 96, lambda name, key: key in cache).length == hit
    pool.retire(pages, 0)
    pool.take(5)  # two pages were free; of the prompt the last three go
    assert one(16).lookup(keys.keys, 96, lambda name, key: key in cache).length == 48


# Several groups


@pytest.mark.parametrize(("shared", "n", "hit"), [(1024, 1025, 768), (1024, 1089, 768), (1088, 1089, 1024)])
def test_inv_35_br_14_a_sharded_target_and_a_replicated_draft(shared, n, hit):
    assert after(mixed(), shared, n) == hit
    assert after(CacheGroups(mixed().groups[::-1], dcp=4), shared, n) == hit


def test_inv_35_what_is_shared():
    store = Store(mixed())
    store.publish(range(1024))
    assert store.lookup(range(1025)).pages == (range(3), range(12))


def test_inv_35_each_page_is_asked_for_once():
    """However the groups lower one another, a drop costs one page, not one a round."""
    draft, other = (Group(name, 64, sharded=False, drops=True) for name in ("draft", "other"))
    store = Store(CacheGroups((Group("target", 64), draft, other), dcp=4))
    store.publish(range(2000))
    assert store.lookup(range(2000)).length == 1792
    store.pages = {(name, key) for name, key in store.pages if name != "other"}
    store.publish(range(1025), names=["other"])
    assert store.lookup(range(2000)).length == 768
    assert len(set(store.asked)) == len(store.asked)


def test_br_14_three_groups_and_a_drop():
    """A group that finds nothing at first would take the others down with it, turn by turn."""
    sizes = (Group("target", 64), Group("draft", 64, sharded=False, drops=True), Group("third", 32, sharded=False))
    assert after(CacheGroups(sizes, dcp=4), 1088, 1089) == 1024
    window = (Group("target", 256), Group("draft", 64, drops=True), Group("swa", 64, window=128, drops=True))
    assert after(CacheGroups(window), 1088, 1089) == 1024
    assert after(CacheGroups(window), 1024, 1089) == 768


def test_publication_is_by_the_page_of_the_group():
    """The page that a drop looks ahead to lies behind a multiple of 256; cut off there it would never be found."""
    groups = mixed()
    target, draft = groups.groups
    assert list(groups.published(target, 1100)) == [0, 1, 2, 3]
    assert list(groups.published(draft, 1100)) == list(range(17))


def test_a_window_takes_its_last_pages():
    groups = CacheGroups((Group("full", 32), Group("swa", 8, window=17)))
    store = Store(groups)
    store.publish(range(100))
    hit = store.lookup(range(100))
    assert hit.length == 96 and hit.pages == (range(3), range(10, 12))
    # 16 tokens before the query: two pages before each multiple of 32.
    assert list(groups.published(groups.groups[1], 100)) == [2, 3, 6, 7, 10, 11]
    # A hole in the window moves the hit to where the window is whole.
    store.pages.discard(("swa", groups.key(groups.groups[1], 10, store.hashes(range(100)))))
    assert store.lookup(range(100)).length == 64
    store.pages = {page for page in store.pages if page[0] == "full"}
    assert store.lookup(range(100)).length == 0


def test_windows_go_round_until_they_agree():
    groups = CacheGroups((Group("full", 8), Group("a", 8, window=9), Group("b", 8, window=9)))
    store = Store(groups)
    hashes = store.hashes(range(41))
    there = {"full": range(5), "a": (4, 1), "b": (3, 1)}  # a serves 40 and 16, b serves 32 and 16
    store.pages = {(g.name, groups.key(g, page, hashes)) for g in groups.groups for page in there[g.name]}
    assert store.lookup(range(41)).length == 16


def test_a_window_of_one_token_needs_no_pages():
    groups = CacheGroups((Group("full", 32), Group("self", 8, window=1)))
    assert list(groups.published(groups.groups[1], 100)) == []
    assert twice(groups, 100) == 96


# What is refused


def deepseek_v4(**more):
    groups = (Group("mla", 64), Group("compressed", 64, row_tokens=4), Group("swa", 64, window=128, sharded=False))
    return CacheGroups(groups, **more)


def test_a_sliding_window_hybrid_is_refused_under_dcp():
    with pytest.raises(ConfigError, match=r"dcp size 4 .* \['swa'\]: use dcp size 1 or switch prefix caching off"):
        deepseek_v4(dcp=4)
    assert twice(deepseek_v4(dcp=1), 1025) == 1024
    off = deepseek_v4(dcp=4, prefix_caching=False)
    assert off.hash_tokens == off.schedule_tokens == 1024
    store = Store(off)
    store.publish(range(5000))
    assert store.lookup(range(5000)).length == 0 and not store.asked and not store.pages


def test_a_replicated_group_never_switches_caching_off():
    for dcp in (2, 4, 8):
        assert twice(CacheGroups(mixed().groups, dcp=dcp), 4097) > 0
        aside = Group("swa", 64, window=128, cached=False)
        assert twice(CacheGroups((*mixed().groups, aside), dcp=dcp), 4097) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group("a", 0), "'a': page_rows must be at least 1, got 0"),
        (lambda: Group("a", 1, window=0), "window must be at least 1, got 0"),
        (lambda: Group("a", 1, row_tokens=-1), "row_tokens"),
        (lambda: CacheGroups(()), "at least one"),
        (lambda: CacheGroups((Group("a", 1), Group("a", 2))), "names must differ"),
        (lambda: CacheGroups((Group("a", 1),), dcp=0), "dcp size must be at least 1, got 0"),
        (lambda: CacheGroups((Group("a", 1, cached=False),)), "none of the cache groups"),
    ],
)
def test_settings_that_mean_nothing(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_hashes_must_reach_far_enough():
    groups = one(4)
    with pytest.raises(ValueError, match="1 hashes given, 2 needed"):
        groups.lookup([b""], 9, lambda name, key: True)
    with pytest.raises(ValueError, match="page 1"):
        groups.key(groups.groups[0], 1, [b""])
    assert groups.lookup([], 0, lambda name, key: True).length == 0


# The search against all lengths tried


@st.composite
def any_groups(draw) -> CacheGroups:
    dcp = draw(st.sampled_from([1, 1, 2, 3]))
    windows = st.none() | st.integers(1, 14) if dcp == 1 else st.none()
    geometry = st.tuples(st.integers(1, 4), st.integers(1, 2), st.booleans(), windows, st.booleans())
    drawn = draw(st.lists(geometry, min_size=1, max_size=4))
    return CacheGroups(tuple(Group(str(i), *fields) for i, fields in enumerate(drawn)), dcp)


def size_of(group: Group, dcp: int) -> int:
    return group.page_rows * group.row_tokens * (dcp if group.sharded else 1)


def serves(group: Group, size: int, length: int, n: int, has) -> bool:
    """By the definition, token by token: all rows that the next query and the drop need lie in pages that are there."""
    first = 0 if group.window is None else max(0, length - (group.window - 1))
    tokens = set(range(first, length)) | (set(range(length, length + size)) if group.drops and length else set())
    return length == 0 or (all(has(t // size) for t in tokens) and (not tokens or max(tokens) < n - 1))


def longest(groups: CacheGroups, n: int, has) -> int:
    """The longest hit, from trying all lengths."""
    sizes = {group: size_of(group, groups.dcp) for group in groups.groups}
    step = math.lcm(*sizes.values())
    lengths = range(0, n, step) if n else [0]
    return max(h for h in lengths if all(serves(g, sizes[g], h, n, lambda p, g=g: has(g, p)) for g in sizes))


@given(any_groups(), st.integers(0, 70), st.data())
def test_inv_25_inv_35_the_longest_hit_is_found(groups, n, data):
    """Any pages may be there or not, as after evictions."""
    gone = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 69)), max_size=6))
    store = Store(groups)
    hashes = store.hashes(range(n))
    whole = {(g, page) for g in groups.groups for page in range(n // size_of(g, groups.dcp))}
    there = {(g, page) for g, page in whole if (int(g.name), page) not in gone}
    store.pages = {(g.name, groups.key(g, page, hashes)) for g, page in there}
    hit = store.lookup(range(n))
    assert hit.length == longest(groups, n, lambda g, page: (g, page) in there)
    for group, pages in zip(groups.groups, hit.pages, strict=True):
        assert all((group, page) in there for page in pages)
        assert group.window is not None or len(pages) * size_of(group, groups.dcp) == hit.length


@given(any_groups(), st.lists(st.lists(st.sampled_from([0, 1]), max_size=40), min_size=2, max_size=6))
def test_inv_22_a_hit_is_a_prefix_that_somebody_computed(groups, prompts):
    """With two letters prompts are nearly equal; the index only keeps what is published."""
    store, earlier = Store(groups), []
    for tokens in prompts:

        def has(group, page, tokens=tokens, earlier=earlier):
            end = (page + 1) * size_of(group, groups.dcp)
            return any(len(old) >= end and old[:end] == tokens[:end] for old in earlier)

        # As long as if everything had been stored: what publication leaves out, no lookup misses.
        assert store.lookup(tokens).length == longest(groups, len(tokens), has)
        store.publish(tokens)
        earlier.append(tokens)


@given(any_groups())
def test_nothing_is_published_in_vain(groups):
    """Each published page is the one that some lookup fails without."""
    step = math.lcm(*(size_of(group, groups.dcp) for group in groups.groups))
    n = 3 * step + 1 + max(size_of(group, groups.dcp) for group in groups.groups)
    store = Store(groups)
    store.publish(range(n))
    everything, hashes = set(store.pages), store.hashes(range(n))
    for group, page in itertools.product(groups.groups, range(4)):
        lost = everything - {(group.name, groups.key(group, page, hashes))}
        if lost == everything or (page + 1) * size_of(group, groups.dcp) > 2 * step:
            continue
        lengths = [length for length in range(n + 1)]
        store.pages = everything
        before = [store.lookup(range(length)).length for length in lengths]
        store.pages = lost
        assert [store.lookup(range(length)).length for length in lengths] != before
