"""The replay of a trace through the prefix cache: it hits what an LRU of equal capacity hits, whatever a rank holds."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.bench import cache, cache_speed
from dcpjax.bench.cache import BLOCK, Prompt
from dcpjax.errors import ConfigError
from dcpjax.layout import CacheLayout


@pytest.fixture
def trace(data):
    return data / "traces" / "mooncake_conversation_300.jsonl"


def talks(turns: int = 5, people: int = 4) -> list[Prompt]:
    """Chats in turn: each prompt is the one before it of the same person and a block more; block 0 is everybody's."""
    chats = ((turn, person) for turn in range(turns) for person in range(people))
    return [Prompt(BLOCK * (turn + 2), (0, *(100 * person + i for i in range(1, turn + 2)))) for turn, person in chats]


def test_an_id_is_always_the_same_tokens():
    assert cache.tokens_of(Prompt(700, (3, 5))) == cache.tokens_of(Prompt(1024, (3, 5)))[:700]
    assert cache.tokens_of(Prompt(512, (3,))) != cache.tokens_of(Prompt(512, (5,)))
    assert len(cache.tokens_of(Prompt(1, (3,)))) == 1


@pytest.mark.parametrize("pool_tokens", [131_072, 1 << 20, None])
def test_the_trace_hits_as_the_oracle(trace, pool_tokens):
    figures = cache.compare(cache.read(trace), pool_tokens, BLOCK)
    assert figures["requests"] == 300 and figures["query_tokens"] == 4_269_971
    assert figures["hit_tokens"] >= 0.99 * figures["oracle_hit_tokens"] > 0
    assert figures["of_oracle"] <= 1.0
    # Of this slice; the whole trace's are 0.3734 and 0.3738.
    assert round(figures["endless_hit_rate"], 4) == 0.0809
    assert round(figures["endless_started_rate"], 4) == 0.0811
    if pool_tokens is None:
        assert figures["hit_rate"] == figures["endless_hit_rate"] and figures["unlike_oracle"] == 0
    else:
        assert figures["hit_rate"] < 0.6 * figures["endless_hit_rate"], "this pool is small"


def test_the_same_hits_at_every_dcp_and_draft_layout(trace):
    """A rank's part of a page changes; what the host sees does not."""
    prompts, seen = cache.read(trace, 50) + talks(), {}
    for dcp in (1, 2, 4, 8):
        for draft_kv in ("sharded", "replicated"):
            figures = cache.compare(prompts, 200_000, BLOCK, dcp, draft_kv)
            seen[dcp, draft_kv] = (figures["hit_tokens"], figures["oracle_hit_tokens"])
            draft = BLOCK if draft_kv == "replicated" else BLOCK // dcp
            assert figures["page_rows"] == {"target": BLOCK // dcp, "draft": draft}
    assert len(set(seen.values())) == 1 and min(seen[4, "sharded"]) > 0
    with pytest.raises(ConfigError, match="block size 512 must be a multiple of .* 3"):
        cache.compare(prompts, 200_000, BLOCK, 3)


@pytest.mark.parametrize("page_tokens", [64, 100, 512, 1024])
def test_pages_of_any_size(page_tokens):
    """Larger ones than a block of the trace, and ones that do not divide it."""
    figures = cache.compare(talks(), None, page_tokens)
    assert figures["unlike_oracle"] == 0
    assert 0 < figures["hit_tokens"] <= figures["query_tokens"]


def test_a_whole_prompt_hits_all_but_its_last_token():
    prompts = [Prompt(1024, (1, 2)), Prompt(1024, (1, 2)), Prompt(1023, (1, 2))]
    figures = cache.compare(prompts, 4 * BLOCK, BLOCK)
    assert figures["hit_tokens"] == figures["oracle_hit_tokens"] == 1023 + 512
    assert cache.started_blocks(prompts) == 2 * 1024


def test_a_pool_that_is_too_small_for_a_turn_of_talks():
    """Every chat is gone when it goes on, but for the block that all share and the newest has."""
    figures = cache.compare(talks(), 8 * BLOCK, BLOCK)
    assert figures["of_oracle"] == 1.0
    assert 0 < figures["hit_tokens"] < 0.5 * cache.compare(talks(), None, BLOCK)["hit_tokens"]
    with pytest.raises(ConfigError, match="a prompt needs 6 pages, the pool has 5: raise --pool-tokens"):
        cache.compare(talks(), 5 * BLOCK, BLOCK)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, BLOCK - 1)), max_size=30),
    st.integers(6, 14),
)
def test_the_free_list_is_the_lru(drawn, pages):
    """Any order of prompts with much in common."""
    whole = [Prompt(BLOCK * len(ids), tuple(ids)) for ids, _ in drawn]
    layout = CacheLayout(pages + 1, BLOCK)
    assert cache.replay(whole, layout) == cache.oracle(whole, BLOCK, pages)
    # A prompt's last tokens take a page that nobody can hit: at most one of the pool is lost to them.
    cut = [Prompt(BLOCK * len(ids) - less, tuple(ids)) for ids, less in drawn]
    for least, hits, most in zip(
        cache.oracle(cut, BLOCK, pages - 1), cache.replay(cut, layout), cache.oracle(cut, BLOCK, pages), strict=True
    ):
        assert least <= hits <= most


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_length": 513, "hash_ids": [1]}', "1: 513 tokens with 1 hash_ids; one per started block"),
        ('{"input_length": 0, "hash_ids": []}', "1: 0 tokens"),
        ("", "no prompts"),
    ],
)
def test_files_that_are_no_trace(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        cache.read(path)


def test_the_command(trace, tmp_path):
    out = tmp_path / "figures.json"
    flags = ["--trace", str(trace), "--pool-tokens", "200000", "--block-size", "512", "--dcp", "4", "--limit", "20"]
    command = [sys.executable, "-m", "dcpjax.bench", "cache", *flags, "--draft-kv", "replicated", "--no-speed"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert {"query_tokens", "hit_tokens", "oracle_hit_tokens"} <= figures.keys()
    assert figures["hit_tokens"] == figures["oracle_hit_tokens"] > 0
    assert "128 rows, 512 of the draft's" in done.stdout
    small = subprocess.run([*command, "--pool-tokens", "512"], capture_output=True, text=True, check=False)
    assert small.returncode == 1 and small.stderr.startswith("error: a prompt needs")


def test_speed_has_both_arms(monkeypatch):
    monkeypatch.setattr(cache_speed, "ROUND_SECONDS", 1e-4)
    rows = cache_speed.measure([16, 8], prompts=2, tokens=64, rounds=5)
    parts = ["hit path", "look-up", "turnover", "take, free", "hashing", "admission"]
    assert [(row["page_tokens"], row["part"]) for row in rows] == [(size, part) for size in (16, 8) for part in parts]
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["us"] <= high and row["ratio"] == row["us"] / row["plain_us"]
        assert row["part"] in cache_speed.line(row)
    assert "at most 2.5 ×" in cache_speed.line(rows[0]) and "at most 1.0 µs" in cache_speed.line(rows[4])
