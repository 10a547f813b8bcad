"""Replays a trace of prompts through the prefix cache, without a model, against an oracle of equal capacity.

The trace is in Mooncake's format: a JSON object per line with `input_length` and `hash_ids`, one id per started block of
512 tokens. An id stands for one fixed block of random tokens. Prompts come one after the other; each takes pages for all
its tokens, publishes the whole ones and gives them back. The oracle is a plain LRU over block prefixes that knows the ids
and never sees a token, key or page. Prediction: the cache hits what the oracle hits, since giving back a request's pages
from last to first makes the pool's free list the LRU; what may differ is the one page that holds a prompt's last tokens.
"""

import argparse
import functools
import json
import pathlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dcpjax.bench import cache_speed
from dcpjax.errors import ConfigError
from dcpjax.host.keys import PageKeys
from dcpjax.host.pages import PagePool
from dcpjax.host.prefix import PrefixCache
from dcpjax.layout import CacheLayout

BLOCK = 512  # tokens of a block of the trace
VOCABULARY = 154_880
KEPT_BLOCKS = 16_384  # 32 MiB of tokens


class Prompt(NamedTuple):
    """num_tokens: its length. ids: of the blocks that it starts."""

    num_tokens: int
    ids: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("--trace", type=pathlib.Path, required=True, help="prompts in Mooncake's format")
    parser.add_argument("--pool-tokens", type=int, help="tokens of the pool; without: endless, no page is lost")
    parser.add_argument("--block-size", type=int, default=BLOCK, help="tokens of a page")
    parser.add_argument("--dcp", type=int, default=1, help="ranks that a page's rows are dealt out over")
    parser.add_argument("--draft-kv", choices=("sharded", "replicated"), default="sharded")
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--no-speed", action="store_true", help="only the replay")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the hit rates of both arms, then times of the cache's parts beside plain ones."""
    try:
        prompts = read(args.trace, args.limit)
        figures = compare(prompts, args.pool_tokens, args.block_size, args.dcp, args.draft_kv)
    except (ConfigError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    figures["trace"] = args.trace.name
    rows = figures["page_rows"]
    print(
        f"{figures['requests']} prompts, {figures['query_tokens']} tokens; pool of {figures['pool_tokens']} tokens in "
        f"pages of {args.block_size}, of which a rank holds {rows['target']} rows, {rows['draft']} of the draft's\n"
        f"hit rate {figures['hit_rate']:.4f}, LRU oracle {figures['oracle_hit_rate']:.4f}: "
        f"{figures['of_oracle']:.2%} of it (predicted 100 %), {figures['unlike_oracle']} prompts differ\n"
        f"endless cache: {figures['endless_hit_rate']:.4f} by whole pages, "
        f"{figures['endless_started_rate']:.4f} if a prompt's last, started block counted as whole\n"
        f"replayed in {figures['seconds']:.1f} s, {figures['prompts_per_second']:.0f} prompts/s",
        flush=True,
    )
    if not args.no_speed:
        figures["speed"] = cache_speed.measure(sorted({args.block_size, 64, 16}, reverse=True))
        print(*map(cache_speed.line, figures["speed"]), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def read(trace: pathlib.Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a trace file, the first `limit` of them. Raises `ConfigError` for a line that is none."""
    prompts = []
    with trace.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and number > limit:
                break
            row = json.loads(line)
            prompt = Prompt(row["input_length"], tuple(row["hash_ids"]))
            if prompt.num_tokens < 1 or len(prompt.ids) != -(-prompt.num_tokens // BLOCK):
                raise ConfigError(
                    f"{trace}:{number}: {prompt.num_tokens} tokens with {len(prompt.ids)} hash_ids; one per started "
                    f"block of {BLOCK} tokens is needed"
                )
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{trace}: no prompts")
    return prompts


def compare(
    prompts: Sequence[Prompt], pool_tokens: int | None, page_tokens: int, dcp: int = 1, draft_kv: str = "sharded"
) -> dict:
    """Figures of one replay beside the oracle's."""
    if pool_tokens is None:
        pool_tokens = page_tokens * sum(-(-prompt.num_tokens // page_tokens) for prompt in prompts)
    # What a rank holds depends on dcp and the draft; the host is given pages and the tokens in them, nothing else.
    target, draft = (
        CacheLayout(1 + pool_tokens // page_tokens, page_tokens, shards)
        for shards in (dcp, dcp if draft_kv == "sharded" else 1)
    )
    begin = time.perf_counter()
    hits = replay(prompts, target)
    seconds = time.perf_counter() - begin
    best, endless = (oracle(prompts, page_tokens, pages) for pages in (target.num_pages - 1, None))
    queries = sum(prompt.num_tokens for prompt in prompts)
    return {
        "requests": len(prompts),
        "pool_tokens": pool_tokens,
        "block_size": page_tokens,
        "dcp": dcp,
        "draft_kv": draft_kv,
        "page_rows": {"target": target.page_rows, "draft": draft.page_rows},
        "query_tokens": queries,
        "hit_tokens": sum(hits),
        "oracle_hit_tokens": sum(best),
        "hit_rate": sum(hits) / queries,
        "oracle_hit_rate": sum(best) / queries,
        "of_oracle": sum(hits) / sum(best) if sum(best) else 1.0,
        "unlike_oracle": sum(a != b for a, b in zip(hits, best, strict=True)),
        "endless_hit_rate": sum(endless) / queries,
        "endless_started_rate": started_blocks(prompts) / queries,
        "seconds": seconds,
        "prompts_per_second": len(prompts) / seconds,
    }


@functools.lru_cache(maxsize=KEPT_BLOCKS)
def block_tokens(hash_id: int) -> bytes:
    """The tokens that an id stands for, int32 `[512]`."""
    return np.random.default_rng(hash_id).integers(VOCABULARY, size=BLOCK, dtype=np.int32).tobytes()


def tokens_of(prompt: Prompt) -> array:
    """Its tokens, int32 `[num_tokens]`."""
    tokens = array("i")
    for hash_id in prompt.ids:
        tokens.frombytes(block_tokens(hash_id))
    return tokens[: prompt.num_tokens]


def replay(prompts: Sequence[Prompt], layout: CacheLayout) -> list[int]:
    """Hit tokens per prompt, of the cache that the engine has. Raises `ConfigError` if a prompt fits in no pool."""
    cache = PrefixCache(num_pages=layout.num_pages, page_tokens=layout.page_tokens)
    pool = PagePool(layout.num_pages, cache)
    hits = []
    for prompt in prompts:
        keys = cache.scheme.start()
        keys.extend(tokens_of(prompt))
        shared = serve(pool, cache, keys, -(-prompt.num_tokens // layout.page_tokens))
        hits.append(min(shared * layout.page_tokens, prompt.num_tokens - 1))
    return hits


def serve(pool: PagePool, cache: PrefixCache, keys: PageKeys, num_pages: int) -> int:
    """One prompt's life without a model: finds, takes, publishes and gives back its pages. Returns how many it found.

    Raises `ConfigError` if the pool is too small for it.
    """
    found = cache.lookup(keys)
    taken = pool.take(num_pages - len(found), share=found)
    if taken is None:
        raise ConfigError(f"a prompt needs {num_pages} pages, the pool has {pool.capacity}: raise --pool-tokens")
    pages = found + taken
    cache.publish(keys, pages, len(found), len(keys.keys))
    pool.retire(pages, 0)
    return len(found)


def oracle(prompts: Sequence[Prompt], page_tokens: int, capacity: int | None) -> list[int]:
    """Hit tokens per prompt of an LRU over the prefixes that end with a page, `capacity` of them; None: endless."""
    nodes: dict[tuple[int, int], int] = {}  # (prefix, next id) → longer prefix
    recent: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = []
    for prompt in prompts:
        prefix, prefixes = 0, []
        for hash_id in prompt.ids:
            prefix = nodes.setdefault((prefix, hash_id), len(nodes) + 1)
            prefixes.append(prefix)
        ends = range(page_tokens, prompt.num_tokens + 1, page_tokens)
        names = [(prefixes[(end - 1) // BLOCK], end) for end in ends]
        matched = next((i for i, name in enumerate(names) if name not in recent), len(names))
        hits.append(min(matched * page_tokens, prompt.num_tokens - 1))
        for name in reversed(names):  # the longest prefix is the oldest, as nobody needs it without the others
            recent[name] = None
            recent.move_to_end(name)
        while capacity is not None and len(recent) > capacity:
            recent.popitem(last=False)
    return hits


def started_blocks(prompts: Sequence[Prompt]) -> int:
    """Hit tokens of an endless cache as traces are usually described: by ids, 512 tokens each, started blocks too."""
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        hits += BLOCK * next((i for i, hash_id in enumerate(prompt.ids) if hash_id not in seen), len(prompt.ids))
        seen.update(prompt.ids)
    return hits
