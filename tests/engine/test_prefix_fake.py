"""Prefix caching through the whole engine, over a runner that reads every hit back: what is found, when, and what it saves."""

import hashlib
import pathlib
import random
import re

import numpy as np
import pytest

from dcpjax.engine import EngineCore
from dcpjax.host.hits import HitCounts
from dcpjax.host.request import SamplingParams
from tests.engine.fake_runner import EOS, VOCAB, FakeRunner, Replay, expected
from tests.engine.test_engine_fake import accept_some

ROOT = pathlib.Path(__file__).parent.parent.parent
ONE = SamplingParams(temperature=0, max_tokens=1)
DRAFTS = pytest.mark.parametrize("k", [0, 5])


def make(*, page=256, tokens=4096, k=0, engine=None, **options):
    """An engine with room for `tokens` tokens at a time."""
    defaults = {"num_pages": tokens // page + 1, "max_model_len": tokens, "max_num_batched_tokens": max(tokens, 64)}
    runner = FakeRunner(page_tokens=page, num_drafts=k, accept=accept_some(k), **(defaults | options))
    return EngineCore(runner, eos_token_ids=[EOS], kv_events=True, **(engine or {}))


def prompt_of(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def ask(engine, prompt, params=ONE, **options):
    """Runs a request to its end."""
    request = engine.add(prompt, params, **options)
    engine.drain()
    engine.scheduler.check()
    return request


# --- how much is hit ----------------------------------------------------------------------------------------------


@DRAFTS
def test_br_01_a_repeated_prompt_hits(k):
    engine = make(k=k)
    assert [ask(engine, prompt_of(1025)).cached_tokens for _ in range(2)] == [0, 1024]


@DRAFTS
def test_br_02_a_long_shared_part_hits(k):
    engine = make(k=k, tokens=2**15)
    assert ask(engine, prompt_of(16_384) + prompt_of(100, 1)).cached_tokens == 0
    assert ask(engine, prompt_of(16_384) + prompt_of(100, 2)).cached_tokens == 16_384


@DRAFTS
@pytest.mark.parametrize(("n", "want"), [(1025, 1024), (2049, 2048), (1023, 0)])
def test_br_03_large_pages_hit_from_the_first_whole_one(n, want, k):
    engine = make(k=k, page=1024)
    assert [ask(engine, prompt_of(n)).cached_tokens for _ in range(2)] == [0, want]


@DRAFTS
@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 256, 257, 512, 513, 1024, 1025, 2048])
def test_inv_23_24_the_hit_formula(n, page, k):
    """Whole pages, the whole prompt too; its last token is computed anew."""
    engine = make(k=k, page=page)
    first, second = (ask(engine, prompt_of(n)) for _ in range(2))
    want = min(n // page * page, n - 1)
    assert (first.cached_tokens, second.cached_tokens) == (0, want)
    assert first.output == second.output
    assert want % page == 0 or want == n - 1


@DRAFTS
@pytest.mark.parametrize(("page", "want"), [(16, 144), (32, 128)])
def test_inv_27_br_08_no_more_than_what_is_equal(page, want, k):
    engine = make(k=k, page=page, tokens=1024)
    ask(engine, prompt_of(150) + [1] * 50)
    assert ask(engine, prompt_of(150) + [2] * 50).cached_tokens == want
    assert engine.stats.prefix.counts.lost_rounding == 150 - want


@DRAFTS
def test_inv_38_salts_part_requests(k):
    engine = make(k=k, tokens=8192)
    salts = ["a", "a", "b", None, "b"]
    hits = [ask(engine, prompt_of(1025), cache_salt=salt).cached_tokens for salt in salts]
    assert hits == [0, 1024, 0, 0, 1024]


def test_the_model_and_the_seed_are_in_every_key():
    """Two engines tell equal keys if and only if all settings are equal."""

    def stored(**options):
        engine = make(page=4, tokens=64, engine=options)
        ask(engine, prompt_of(8))
        (event,) = engine.drain_events()
        return event.keys

    assert stored() == stored()
    chains = [stored(), stored(model="a"), stored(key_seed="a"), stored(hash=lambda data: hashlib.md5(data).digest())]
    for page in range(2):
        assert len({chain[page] for chain in chains}) == 4


def test_equal_at_every_layout():
    """Pages are logical: nothing that decides on hits knows over how many devices a page is dealt out."""
    names = [
        "host/keys",
        "host/prefix",
        "host/pages",
        "host/hits",
        "host/events",
        "host/request",
        "scheduler",
        "engine",
    ]
    for name in names:
        text = (ROOT / "dcpjax" / f"{name}.py").read_text()
        assert not re.search("dcp(?!jax)|interleave|shard", text, re.IGNORECASE), name


@DRAFTS
def test_br_16_what_is_reported_is_what_was_shared(k):
    engine = make(k=k, page=16, tokens=256)
    first = ask(engine, prompt_of(50))
    second = engine.add(prompt_of(50), SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    shared = sum(a == b for a, b in zip(second.pages, range(1, 4)))
    assert second.matched == second.cached_tokens == 16 * shared == 48 and first.cached_tokens == 0
    engine.drain()
    assert second.cached_tokens == 48


def test_br_21_no_store():
    engine = make(page=16, tokens=512)
    ask(engine, prompt_of(20, 1))
    before, events = engine.stats.prefix.cached_pages, engine.drain_events()
    assert before == 1 and len(events) == 1
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    secret = ask(engine, prompt_of(100), params, no_store=True)
    assert secret.cached_tokens == 0 and engine.stats.prefix.cached_pages == before and engine.drain_events() == []
    assert ask(engine, prompt_of(100)).cached_tokens == 0
    assert ask(engine, prompt_of(100), no_store=True).cached_tokens == 96, "it reads what others stored"


@DRAFTS
def test_br_23_what_was_lost_is_told_apart(k):
    """10 warm turns of 300 new tokens each: all counters add up, and no page is given back for the drafts."""
    engine = make(k=k, tokens=4096)
    talk, queries, hits = prompt_of(600), 0, 0
    ask(engine, talk)
    for turn in range(10):
        known, talk = len(talk), talk + prompt_of(300, turn + 1)
        request = ask(engine, talk)
        assert request.cached_tokens == known // 256 * 256
        queries, hits = queries + len(talk), hits + request.cached_tokens
    counts = engine.stats.prefix.counts
    assert counts == HitCounts(requests=11, queries=queries + 600, hits=hits)
    assert counts.shareable == hits and engine.stats.prefix.hit_rate == hits / (queries + 600)
    # A page that differs inside, and a whole prompt.
    ask(engine, talk[:1000] + [VOCAB - 1 - talk[1000]] * 300)
    ask(engine, talk[:1024])
    more = engine.stats.prefix.counts
    assert (more.lost_rounding, more.lost_last) == (1000 - 768, 1)
    assert more.hits - hits == 768 + 1023 and more.shareable == more.hits + 233
    assert more.queries - counts.queries == 1300 + 1024


# --- what a hit holds ---------------------------------------------------------------------------------------------


@DRAFTS
def test_br_13_br_24_draft_rows_come_with_their_pages(k):
    """Equal up to two pages, other tokens after: the runner reads all draft rows back; those of the hit are untouched."""
    engine = make(k=k, page=16, tokens=256)
    runner = engine._runner
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first = engine.add(prompt_of(32) + [1, 2, 3], params)
    engine.step()
    pages = first.pages[:2]
    engine.drain()
    cold = runner._draft[pages].copy(), runner._target[pages].copy()
    second = ask(engine, prompt_of(32) + [4, 5, 6], params)
    assert second.cached_tokens == 32 and second.output == expected(second.prompt, params, 256)[0]
    for before, after in zip(cold, (runner._draft[pages], runner._target[pages])):
        np.testing.assert_array_equal(before, after)
    assert np.isnan(runner._draft[pages[0], 0]) and not np.isnan(runner._draft[pages].ravel()[1:]).any()


@DRAFTS
def test_br_26_what_follows_a_hit_is_written(k):
    engine = make(k=k, page=16, tokens=256)
    ask(engine, prompt_of(32) + [1])
    request = engine.add(prompt_of(32) + [5, 6, 7, 8, 9], ONE)
    engine.step()
    assert request.matched == 32
    memory = [np.concatenate([array[page] for page in request.pages]) for array in _memory(engine)]
    engine.drain()
    assert memory[0][32:37].tolist() == [5, 6, 7, 8, 9]
    assert memory[1][32:38].tolist() == [5, 6, 7, 8, 9, request.output[0]], "the first by the row that is only read"


def _memory(engine):
    return engine._runner._target, engine._runner._draft


@DRAFTS
def test_a_whole_prompt_starts_at_its_last_token(k):
    engine = make(k=k, page=16, tokens=256)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first = ask(engine, prompt_of(32), params)
    second = engine.add(prompt_of(32), params)
    engine.step()
    _, ((_, _, start, num_tokens, emit, new, pages),) = engine._runner.log[-1]
    assert (start, num_tokens, emit, new, second.matched, second.cached_tokens) == (31, 1, True, True, 32, 31)
    assert len(pages) >= 3, "the draft's slot 32 is in a page of its own"
    engine.drain()
    assert second.output == first.output


@DRAFTS
def test_generated_tokens_are_hit_by_the_next_turn(k):
    engine = make(k=k, page=4, tokens=128)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first = ask(engine, prompt_of(10), params)
    talk = first.prompt + first.output
    second = ask(engine, talk + [3, 4], params)
    # The row of the last token was perhaps never written.
    assert second.cached_tokens == (len(talk) - 1) // 4 * 4 == 28
    assert second.output == expected(second.prompt, params, 128)[0]


# --- when it is hit -----------------------------------------------------------------------------------------------


@DRAFTS
def test_prompts_that_arrive_together_share_within_a_step(k):
    """The first writes, the others read, in one program. A chunk that ends inside a page shares the whole ones."""
    engine = make(k=k, page=16, tokens=256, max_num_batched_tokens=64)
    requests = [engine.add(prompt_of(40), ONE) for _ in range(3)]
    engine.step()
    assert [row[0] for row in engine._runner.log[0][1]] == [request.id for request in requests]
    assert [request.matched for request in requests] == [0, 32, 32]
    engine.drain()
    assert len({tuple(request.output) for request in requests}) == 1


@DRAFTS
def test_inv_30_only_what_is_verified_can_be_hit(k):
    """15 prompt tokens and drafts: nothing until 16 are verified and their rows written; never a partial page."""
    for mode in (True, False):
        engine = make(k=k, page=16, tokens=128, engine={"overlap": mode})
        request = engine.add(prompt_of(15), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        while request.status != "finished":
            engine.step()
            tokens = request.tokens
            keys = engine.scheduler.prefix.scheme.start()
            keys.extend(tokens[: len(tokens) - 1])
            assert list(engine.scheduler.prefix._nodes) == keys.keys[: max(len(tokens) - 1, 0) // 16]
        assert engine.stats.prefix.cached_pages == 74 // 16


def test_a_page_on_its_way_back_is_shared_at_once():
    """Its writer is aborted with the step in flight: the page is used until that is read, and whole already."""
    engine = make(page=16, tokens=256)
    first = engine.add(prompt_of(40), SamplingParams(temperature=0, max_tokens=20))
    engine.step()
    pages = first.pages[:2]
    engine.abort(first.id)
    pool = engine.scheduler.pool
    assert pool.num_retiring == 3 and engine._inflight is not None
    second = engine.add(prompt_of(40), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.step()
    assert second.pages[:2] == pages and second.matched == 32
    engine.scheduler.check()
    assert pool.num_retiring == 0 and pool.num_used == 3, "its own partial page came back"
    engine.drain()
    assert second.output == expected(second.prompt, second.params, 256)[0]


def test_a_page_is_evicted_when_it_is_needed_and_no_earlier():
    """A pool of 8 pages of 16: the old prompt's tail goes first, and its head is still hit."""
    engine = make(page=16, tokens=128, max_model_len=128)
    ask(engine, prompt_of(64))
    ask(engine, prompt_of(60, 1))
    assert engine.stats.prefix.cached_pages == 4 + 3
    ask(engine, prompt_of(60, 2))
    assert engine.stats.prefix.cached_pages == 1 + 3 + 3
    assert ask(engine, prompt_of(64)).cached_tokens == 16
    replay = Replay()
    replay.apply(engine.drain_events())
    assert replay.keys == engine.scheduler.prefix._nodes.keys()


@pytest.mark.parametrize("k", [0, 3, 5])
@pytest.mark.parametrize("n", [15, 16, 17, 130])
def test_inv_31_who_is_preempted_hits_its_own_pages(n, k):
    """Any prompt of a page or more; the text is that of a run without pre-emption. 10 pages, 16 tokens each."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    engine = make(k=k, page=16, num_pages=10, max_model_len=144)
    request, matched = engine.add(prompt_of(n), params), []
    for _ in range(3):
        have = len(request.output)
        while len(request.output) <= have:
            engine.step()
        engine.scheduler.preempt(request)
        while request.status == "waiting":
            engine.step()
        assert request.status == "running"
        engine.scheduler.check()
        matched.append(request.matched)
    engine.drain()
    assert request.output == expected(request.prompt, params, 144)[0]
    assert matched[0] >= n // 16 * 16 and matched == sorted(matched) and request.cached_tokens == 0
