"""A prefix cache's life: reset, counters, the same decisions everywhere, and all of it at once."""

import dataclasses
import json
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.engine import EngineCore
from dcpjax.errors import RequestError
from dcpjax.host.events import Cleared
from dcpjax.host.hits import HitCounts
from dcpjax.host.request import SamplingParams
from tests.engine.fake_runner import VOCAB, FakeRunner, expected
from tests.engine.test_engine_fake import Arrival, accept_some, check_texts, run, sizes
from tests.engine.test_prefix_fake import ONE, ROOT, ask, make, prompt_of


def test_inv_32_reset():
    engine = make(page=16, tokens=256)
    for want in (0, 96):
        assert ask(engine, prompt_of(100)).cached_tokens == want
    engine.drain_events()
    assert engine.reset_prefix_cache() and engine.drain_events() == [Cleared()]
    stats = engine.stats.prefix
    assert (stats.cached_pages, stats.hit_rate, stats.counts.requests) == (0, 0, 2), "sums stay"
    assert engine.scheduler.pool.num_free == 16
    assert ask(engine, prompt_of(100)).cached_tokens == 0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_reset_while_requests_run_makes_their_pages_nobody_elses(steps):
    """They keep them and their text. What they write afterwards stands on rows from before, and is not shared either."""
    engine = make(page=4, tokens=256, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ask(engine, prompt_of(20))
    runs = engine.add(prompt_of(20), params)
    for _ in range(steps):
        engine.step()
    engine.drain_events()
    assert not engine.reset_prefix_cache(), "its pages are used"
    assert runs.status == "running" and runs.pages and engine.drain_events() == [Cleared()]
    assert engine.stats.prefix.cached_pages == 0
    same = engine.add(runs.tokens, params)
    engine.drain()
    assert same.cached_tokens == 0 and runs.output == expected(runs.prompt, params, 64)[0]
    assert same.output == expected(same.prompt, params, 64)[0]
    engine.scheduler.check()
    # What was admitted after the reset can be hit: as much of it as is written.
    assert ask(engine, same.tokens).cached_tokens == (same.num_tokens - 1) // 4 * 4


def test_a_request_that_a_reset_left_running_shares_again_once_preempted():
    engine = make(page=4, tokens=256, max_model_len=64)
    request = engine.add(prompt_of(20), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    engine.step()
    engine.reset_prefix_cache()
    engine.step()
    assert engine.stats.prefix.cached_pages == 0
    engine.scheduler.preempt(request)
    engine.drain()
    assert engine.stats.prefix.preempted.hits == 0
    assert ask(engine, request.tokens).cached_tokens == (request.num_tokens - 1) // 4 * 4


def test_reset_of_an_idle_engine_does_not_wait_for_a_step_that_is_nobodys():
    engine = make(page=16, tokens=256)
    request = engine.add(prompt_of(40), SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.abort(request.id)
    assert engine._inflight is not None and engine.reset_prefix_cache()
    assert not engine.has_work and engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_inv_32_reset_with_running_requests(k, overlap):
    """They go back to the queue in the order of arrival and lose no token, those of the step in flight neither."""
    engine = make(k=k, page=4, tokens=256, max_model_len=64, engine={"overlap": overlap})
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [engine.add(prompt_of(10 + i, i), params) for i in range(6)]
    seen = {request: [] for request in requests}
    for step in range(8):
        for delta in engine.step():
            seen[delta.request] += delta.token_ids
        if step in (0, 3, 4):
            running = list(engine.scheduler.running)
            assert engine.reset_prefix_cache(running=True)
            assert list(engine.scheduler.waiting)[: len(running)] == running
            assert engine.stats.prefix.cached_pages == 0 == engine.scheduler.pool.num_used
            engine.scheduler.check()
    for delta in engine.drain():
        seen[delta.request] += delta.token_ids
    for request in requests:
        assert seen[request] == request.output == expected(request.prompt, params, 64)[0]
    assert [type(event) for event in engine.drain_events()].count(Cleared) == 3


@pytest.mark.parametrize("step", [EngineCore.step, EngineCore.step_sync])
def test_tokens_read_by_a_reset_are_handed_out(step):
    """The last ones of a request may come so: there is work until they are asked for."""
    engine = make(page=4, tokens=64)
    request = engine.add([1, 2, 3], ONE)
    assert engine.step() == [] and engine.reset_prefix_cache(running=True)
    assert request.status == "finished" and engine.has_work
    (delta,) = step(engine)
    assert delta.finished and delta.token_ids == request.output and not engine.has_work


def test_inv_34_one_admission_counts_once():
    """A request that waits 5 steps for pages, and one that is pre-empted."""
    engine = make(page=16, num_pages=6, max_model_len=80, max_num_batched_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = engine.add(prompt_of(50), params)
    engine.step()
    waits = engine.add(prompt_of(50)[:40] + [1] * 20, params)
    for _ in range(5):
        engine.step()
        assert waits.status == "waiting"
    assert engine.stats.prefix.counts == HitCounts(requests=1, queries=50)
    engine.drain()
    want = HitCounts(requests=2, queries=110, hits=32, lost_rounding=8)
    assert engine.stats.prefix.counts == want and engine.stats.prefix.hit_rate == 32 / 110
    again = engine.add(prompt_of(50), params)
    engine.step()
    engine.scheduler.preempt(again)
    engine.drain()
    stats = engine.stats.prefix
    assert stats.counts.requests == 3 and stats.preempted.requests == 1
    assert stats.preempted == HitCounts(requests=1, queries=51, hits=48)
    assert stats.hit_rate == stats.counts.hits / stats.counts.queries and first.output == again.output


def test_caching_off_shares_and_counts_nothing():
    engine = make(page=4, tokens=64, engine={"prefix_caching": False})
    assert [ask(engine, prompt_of(20)).cached_tokens for _ in range(2)] == [0, 0]
    stats = engine.stats.prefix
    assert stats.counts == HitCounts() and stats.cached_pages == 0 and engine.drain_events() == []
    assert engine.reset_prefix_cache()


TRACE = """
import json
from tests.engine.test_prefix_life import families
from tests.engine.test_engine_fake import run, accept_some
_, runner, engine = run(families(5), num_pages=15, max_model_len=40, num_drafts=3, accept=accept_some(3))
prefix = engine.scheduler.prefix
print(json.dumps([runner.log, [key.hex() for key in prefix._nodes], list(engine.scheduler.pool._free)]))
"""


def families(seed, count=14, max_model_len=40):
    """Requests whose prompts start alike, with salts, aborts and secrets among them."""
    rng = random.Random(seed)
    bases = [[rng.randrange(VOCAB) for _ in range(max_model_len)] for _ in range(2)]
    arrivals = []
    for i in range(count):
        shared, own = rng.randrange(max_model_len - 8), rng.randrange(6)
        prompt = rng.choice(bases)[:shared] + [rng.randrange(VOCAB) for _ in range(own)] or [1]
        params = SamplingParams(
            temperature=rng.choice((0, 1)), max_tokens=rng.randrange(1, 20), ignore_eos=rng.random() < 0.7
        )
        leaves = rng.randrange(6) if rng.random() < 0.15 else None
        salt = rng.choice((None, None, None, "a"))
        arrivals.append(Arrival(i // 2, prompt, params, leaves, salt, rng.random() < 0.1))
    return arrivals


def test_inv_37_every_process_decides_the_same():
    """Whatever order its sets have."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", TRACE],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    log, keys, free = json.loads(outputs.pop())
    assert len(log) > 15 and keys and len(free) == 14


# --- all of it at once --------------------------------------------------------------------------------------------


class AnyNumber:
    """Chooses any number of drafts."""

    def __init__(self, rng: random.Random, most: int):
        self._rng, self._most = rng, most

    def choose(self, num_rows: int) -> int:
        return self._rng.randint(0, self._most)

    def observe(self, verified, accepted: list[int]) -> None:
        """verified: of each row, or of all."""
        rows = np.broadcast_to(verified, len(accepted))
        assert accepted and all(0 <= n <= most for n, most in zip(accepted, rows))


@settings(max_examples=100)
@given(st.integers(0, 2**32), sizes(), st.integers(0, 2**32))
def test_any_mix_of_families_gives_each_prompt_its_text(seed, options, choices):
    """Hits, evictions, pre-emptions, aborts, salts, priorities, any number of drafts: read back by the runner at every step."""
    arrivals, rng = families(seed), random.Random(choices)
    if rng.random() < 0.5:
        arrivals = [dataclasses.replace(arrival, priority=rng.randrange(3)) for arrival in arrivals]
    for mode in ("overlap", "sync", "mixed"):
        requests, _, engine = run(arrivals, mode=mode, drafts=AnyNumber(rng, options["num_drafts"]), **options)
        check_texts(arrivals, requests, options["max_model_len"])
        counts = engine.stats.prefix.counts
        assert counts.requests == sum(request.cached_tokens is not None for request in requests.values())
        assert counts.hits == sum(request.cached_tokens or 0 for request in requests.values())


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_preemption_with_hits_changes_no_text(k):
    preemptions = hits = again = 0
    for seed in range(6):
        arrivals = families(seed, count=20, max_model_len=60)
        options = {"num_pages": 16, "max_model_len": 60, "num_drafts": k, "max_num_batched_tokens": 60}
        requests, _, engine = run(arrivals, accept=accept_some(k), **options)
        check_texts(arrivals, requests, 60)
        stats = engine.stats
        preemptions += stats.preemptions
        hits += stats.prefix.counts.hits
        again += stats.prefix.preempted.hits
    assert preemptions >= 4 and hits > 400 and again > 20


@pytest.mark.parametrize("wrong", [{"cache_salt": ""}, {"cache_salt": 5}, {"cache_salt": b"x"}, {"no_store": 1}])
def test_wrong_wishes_about_the_cache_are_refused_at_once(wrong):
    engine = EngineCore(FakeRunner(), eos_token_ids=[])
    with pytest.raises(RequestError, match=next(iter(wrong))):
        engine.add([1, 2, 3], SamplingParams(), **wrong)
    assert not engine.has_work
