"""Times of the prefix cache's parts, each beside the least Python that does the same.

Over the same prompts, in µs per page, hashing in µs per 16 tokens; the plain arm stands after the bar::

    hit path    find a cached prompt's pages by its keys, share them, give them back
                | dict of keys, list of counts, dict of free pages in order
    look-up     only find them                           | one dict access per key and nothing else
    turnover    take pages in a full pool, so that each evicts one; publish, give back    | the same dicts
    take, free  take pages and give them back, nothing cached                             | ordered dict, counts
    hashing     keys of a prompt, a list of ints         | sha256 of parent and tokens, page by page
    admission   hashing and hit path                     | that sha256 and the dicts of the hit path

Times are of this thread's CPU, so that what else the machine does counts less.
"""

import hashlib
import statistics
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dcpjax.host.keys import PageKeys
from dcpjax.host.pages import PagePool
from dcpjax.host.prefix import PrefixCache

ROUNDS = 7
ROUND_SECONDS = 0.02  # an arm runs as often as this takes
PROMPTS, PROMPT_TOKENS = 64, 16_384
HASHED = 16  # tokens that a hashing figure is for

# What is allowed: ratio to the plain arm, and µs.
ALLOWED_RATIO = {"hit path": 2.5}
ALLOWED_US = {"hashing": 1.0}

Arm = Callable[[], None]


def measure(
    sizes: Iterable[int], *, prompts: int = PROMPTS, tokens: int = PROMPT_TOKENS, rounds: int = ROUNDS
) -> list[dict]:
    """A row per page size and part: median and quartiles in µs of both arms, their ratio, what is allowed."""
    texts = np.random.default_rng(0).integers(100_000, size=(prompts, tokens)).tolist()
    rows = []
    for page_tokens in sizes:
        pages = prompts * (tokens // page_tokens)
        for part, units, ours, plain in (
            *_hits(texts, page_tokens, pages),
            _turnover(texts, page_tokens, pages),
            _take_and_free(pages),
            _hashing(texts, page_tokens),
            _admission(texts, page_tokens, pages),
        ):
            times = _interleaved((ours, plain), units, rounds)
            (us, spread), (plain_us, plain_spread) = (_median_and_quartiles(arm) for arm in times)
            row = {"page_tokens": page_tokens, "part": part, "us": us, "quartiles": spread}
            row |= {"plain_us": plain_us, "plain_quartiles": plain_spread, "ratio": us / plain_us}
            row |= {"allowed_ratio": ALLOWED_RATIO.get(part), "allowed_us": ALLOWED_US.get(part)}
            rows.append(row)
    return rows


def line(row: dict) -> str:
    """A row to read."""
    allowed = [f"{row[key]} {word}" for key, word in (("allowed_ratio", "×"), ("allowed_us", "µs")) if row[key]]
    return (
        f"page of {row['page_tokens']:3d}: {row['part']:10s} {row['us']:7.3f} µs, plain {row['plain_us']:7.3f} µs, "
        f"ratio {row['ratio']:5.2f}" + (f" (at most {allowed[0]})" if allowed else "")
    )


def _interleaved(arms: Sequence[Arm], units: int, rounds: int) -> list[list[float]]:
    """µs per unit of each arm, in turn, so that both see the same machine. The first run of each is thrown away."""
    times: list[list[float]] = [[] for _ in arms]
    counts = [max(1, round(ROUND_SECONDS / _seconds(arm, 1))) for arm in arms]
    for _ in range(rounds):
        for arm, count, spent in zip(arms, counts, times, strict=True):
            spent.append(_seconds(arm, count) / units * 1e6)
    return times


def _seconds(arm: Arm, count: int) -> float:
    """Of one run, over `count` of them."""
    begin = time.thread_time()
    for _ in range(count):
        arm()
    return (time.thread_time() - begin) / count


def _median_and_quartiles(times: Sequence[float]) -> tuple[float, list[float]]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, [low, high]


def _keys_of(cache: PrefixCache, texts: Sequence[list[int]]) -> list[PageKeys]:
    made = []
    for text in texts:
        keys = cache.scheme.start()
        keys.extend(text)
        made.append(keys)
    return made


class Plain:
    """A cache of pages by key and nothing more: no tokens, no tree, no epochs. Plain dicts, one loop for each step.

    find, share, take, publish, give_back: the least that does what `PrefixCache` and `PagePool` do.
    """

    def __init__(self, pages: int):
        self.index: dict[bytes, int] = {}
        self.key_of: list[bytes | None] = [None] * pages
        self.refs = [0] * pages
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))

    def find(self, keys: Sequence[bytes]) -> list[int]:
        index, pages = self.index, []
        for key in keys:
            page = index.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        refs, free = self.refs, self.free
        for page in pages:
            if refs[page] == 0:
                del free[page]
            refs[page] += 1

    def take(self, n: int) -> list[int]:
        refs, free, index, key_of = self.refs, self.free, self.index, self.key_of
        pages = [free.popitem(last=False)[0] for _ in range(n)]
        for page in pages:
            refs[page] = 1
            key = key_of[page]
            if key is not None:
                del index[key]
                key_of[page] = None
        return pages

    def publish(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        index, key_of = self.index, self.key_of
        for key, page in zip(keys, pages, strict=True):
            index[key] = page
            key_of[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        refs, free = self.refs, self.free
        for page in reversed(pages):
            refs[page] -= 1
            if refs[page] == 0:
                free[page] = None


def _filled(texts, page_tokens: int, num_pages: int) -> tuple[PrefixCache, PagePool, Plain]:
    """Both arms with all pages of all prompts."""
    cache = PrefixCache(num_pages=num_pages + 1, page_tokens=page_tokens)
    pool, plain = PagePool(num_pages + 1, cache), Plain(num_pages)
    for keys in _keys_of(cache, texts):
        pages = pool.take(len(keys.keys))
        cache.publish(keys, pages, 0, len(pages))
        pool.retire(pages, 0)
        pages = plain.take(len(keys.keys))
        plain.publish(keys.keys, pages)
        plain.give_back(pages)
    return cache, pool, plain


def _hits(texts, page_tokens: int, num_pages: int):
    cache, pool, plain = _filled(texts, page_tokens, num_pages)
    # Made again: equal bytes in other objects, as a later request has them.
    made = _keys_of(cache, texts)
    assert all(len(cache.lookup(keys)) == len(plain.find(keys.keys)) == len(keys.keys) for keys in made)

    def ours() -> None:
        for keys in made:
            pages = cache.lookup(keys)
            pool.take(0, share=pages)
            pool.retire(pages, 0)

    def beside() -> None:
        for keys in made:
            pages = plain.find(keys.keys)
            plain.share(pages)
            plain.give_back(pages)

    def look_up() -> None:
        for keys in made:
            cache.lookup(keys)

    def access() -> None:
        index = plain.index
        for keys in made:
            [index[key] for key in keys.keys]

    return ("hit path", num_pages, ours, beside), ("look-up", num_pages, look_up, access)


def _turnover(texts, page_tokens: int, num_pages: int):
    half = num_pages // 2  # of what is published, in turn: each prompt finds its pages gone
    cache = PrefixCache(num_pages=half + 1, page_tokens=page_tokens)
    pool, plain = PagePool(half + 1, cache), Plain(half)
    made = _keys_of(cache, texts)

    def ours() -> None:
        for keys in made:
            found = cache.lookup(keys)
            pages = found + pool.take(len(keys.keys) - len(found), share=found)
            cache.publish(keys, pages, len(found), len(pages))
            pool.retire(pages, 0)

    def beside() -> None:
        for keys in made:
            found = plain.find(keys.keys)
            plain.share(found)
            pages = found + plain.take(len(keys.keys) - len(found))
            plain.publish(keys.keys, pages)
            plain.give_back(pages)

    return "turnover", num_pages, ours, beside


def _take_and_free(num_pages: int):
    pool, plain = PagePool(num_pages + 1), Plain(num_pages)
    n = max(num_pages // 4, 1)

    def ours() -> None:
        for _ in range(4):
            pool.retire(pool.take(n), 0)

    def beside() -> None:
        refs, free = plain.refs, plain.free
        for _ in range(4):
            pages = [free.popitem(last=False)[0] for _ in range(n)]
            for page in pages:
                refs[page] = 1
            for page in reversed(pages):
                refs[page] -= 1
                if refs[page] == 0:
                    free[page] = None

    return "take, free", 4 * n, ours, beside


def _plain_keys(text: list[int], page_tokens: int) -> list[bytes]:
    data, size, parent, keys = array("i", text).tobytes(), page_tokens * 4, b"", []
    for start in range(0, len(data) - size + 1, size):
        parent = hashlib.sha256(parent + data[start : start + size]).digest()
        keys.append(parent)
    return keys


def _hashing(texts, page_tokens: int):
    scheme = PrefixCache(num_pages=2, page_tokens=page_tokens).scheme

    def ours() -> None:
        for text in texts:
            scheme.start().extend(text)

    def beside() -> None:
        for text in texts:
            _plain_keys(text, page_tokens)

    return "hashing", sum(len(text) for text in texts) // HASHED, ours, beside


def _admission(texts, page_tokens: int, num_pages: int):
    cache, pool, _ = _filled(texts, page_tokens, num_pages)
    plain = Plain(num_pages)
    for text in texts:
        pages = plain.take(len(text) // page_tokens)
        plain.publish(_plain_keys(text, page_tokens), pages)
        plain.give_back(pages)

    def ours() -> None:
        for text in texts:
            keys = cache.scheme.start()
            keys.extend(text)
            pages = cache.lookup(keys)
            pool.take(0, share=pages)
            pool.retire(pages, 0)

    def beside() -> None:
        for text in texts:
            pages = plain.find(_plain_keys(text, page_tokens))
            plain.share(pages)
            plain.give_back(pages)

    return "admission", num_pages, ours, beside
