"""The engine over a runner without a device: whatever the mix, each prompt gets its own text."""

import dataclasses
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.engine import EngineCore
from dcpjax.errors import RequestError
from dcpjax.host.request import SamplingParams
from dcpjax.host.speculation import Acceptance
from tests.engine.fake_runner import EOS, VOCAB, FakeRunner, Replay, expected

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it comes, what it asks, and after how many steps its user leaves."""

    step: int
    prompt: list[int]
    params: SamplingParams
    leaves: int | None = None
    salt: str | None = None
    no_store: bool = False
    priority: int = 0


def run(arrivals, *, mode="overlap", prefix_caching=True, drafts=None, **options):
    """Plays a trace to its end, checking every invariant after every step. Returns requests, runner and engine.

    mode: "overlap", "sync", or "mixed": now one, now the other.
    """
    runner = FakeRunner(**options)
    engine = EngineCore(
        runner,
        eos_token_ids=[EOS],
        overlap=mode != "sync",
        prefix_caching=prefix_caching,
        drafts=drafts,
        kv_events=True,
    )
    replay = Replay()
    requests, seen, ended, now = {}, {}, [], 0
    while len(requests) < len(arrivals) or engine.has_work:
        for i, arrival in enumerate(arrivals):
            if arrival.step <= now and i not in requests:
                requests[i] = engine.add(
                    arrival.prompt,
                    arrival.params,
                    request_id=str(i),
                    cache_salt=arrival.salt,
                    no_store=arrival.no_store,
                    priority=arrival.priority,
                )
                seen[i] = []
            if arrival.leaves is not None and now >= arrival.step + arrival.leaves and str(i) in engine._requests:
                assert engine.abort(str(i)).finished
                ended.append(requests[i])
        oldest = next((r for r in engine.scheduler.running if not r.complete), None)
        sync = mode == "sync" or (mode == "mixed" and now % 3 == 0)
        was_in_flight = engine._inflight is not None
        planned = len(runner.log)
        for delta in engine.step_sync() if sync else engine.step():
            assert delta.token_ids and delta.request not in ended
            seen[int(delta.request.id)] += delta.token_ids
            if delta.finished:
                ended.append(delta.request)
        if oldest is not None and not was_in_flight:
            assert oldest.id in [row[0] for row in runner.log[planned][1]], "the oldest always gets on"
        engine.scheduler.check()
        replay.apply(engine.drain_events())
        if prefix_caching:
            assert replay.keys == engine.scheduler.prefix._nodes.keys()
        now += 1
        assert now < 5000
    assert engine.scheduler.pool.num_used == 0 and not runner.unread
    assert len(engine.scheduler._rows) == runner.max_num_seqs
    assert len(ended) == len(arrivals)
    for i, request in requests.items():
        assert seen[i] == request.output
        assert (request.inflight, request.promised, request.pages, request.row) == (0, 0, [], None)
    if any(arrival.priority for arrival in arrivals):
        return requests, runner, engine
    firsts = list(dict.fromkeys(row[0] for _, rows in runner.log for row in sorted(rows, key=lambda r: int(r[0]))))
    order = sorted(firsts, key=lambda name: (arrivals[int(name)].step, int(name)))
    assert firsts == order, "first come, first served"
    return requests, runner, engine


def check_texts(arrivals, requests, max_model_len):
    for i, arrival in enumerate(arrivals):
        request = requests[i]
        output, reason = expected(arrival.prompt, arrival.params, max_model_len, request.seed, request.choice)
        if request.finish_reason == "abort":
            assert arrival.leaves is not None and request.output == output[: len(request.output)] != output
        else:
            assert (request.output, request.finish_reason) == (output, reason)


def accept_some(k):
    return lambda length: 1 + zlib.crc32(bytes([length])) % (k + 1)


@st.composite
def traces(draw, max_model_len=40):
    """Up to 7 requests. Prompts and limits like to sit at the edges of pages and of the context."""
    lengths = st.one_of(
        st.integers(1, max_model_len - 1), st.sampled_from([1, 3, 4, 5, 8, max_model_len - 2, max_model_len - 1])
    )
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 1]),
        max_tokens=st.one_of(st.none(), st.integers(1, 30), st.sampled_from([4, 8])),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (7, 8)]),
        min_tokens=st.just(0),
    )
    arrivals = []
    for _ in range(draw(st.integers(1, 7))):
        rng = random.Random(draw(st.integers(0, 2**32)))
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 20)),
                prompt=[rng.randrange(VOCAB) for _ in range(draw(lengths))],
                params=draw(params),
                leaves=draw(st.one_of(st.none(), st.none(), st.integers(0, 15))),
            )
        )
    return sorted(arrivals, key=lambda arrival: arrival.step)


@st.composite
def sizes(draw, max_model_len=40):
    k = draw(st.sampled_from([0, 0, 1, 3]))
    seqs = draw(st.integers(1, 4))
    page = draw(st.sampled_from([1, 4, 8]))
    least = max_model_len // page  # the longest request fits just so
    return {
        "num_pages": 1 + least + draw(st.sampled_from([0, 1, least // 2, least * 4])),
        "page_tokens": page,
        "max_model_len": max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": seqs * (k + 1) + draw(st.integers(0, 40)),
        "num_drafts": k,
        "accept": accept_some(k),
    }


@settings(max_examples=200)
@given(traces(), sizes())
def test_any_mix_gives_each_prompt_its_text(arrivals, options):
    for mode in ("overlap", "sync", "mixed"):
        requests, _, _ = run(arrivals, mode=mode, **options)
        check_texts(arrivals, requests, options["max_model_len"])


def crowd(seed, count=12, max_model_len=40, **params):
    rng = random.Random(seed)
    return [
        Arrival(
            step=i // 3,
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_model_len // 2))],
            params=SamplingParams(**({"temperature": 0, "max_tokens": rng.randrange(5, 20)} | params)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", ["overlap", "sync", "mixed"])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_preemption_changes_no_text(k, mode):
    """A pool that holds the longest request and little more: every crowd is pre-empted, and ends as if alone."""
    preemptions = 0
    for seed in range(6):
        arrivals = crowd(seed, ignore_eos=True)
        requests, _, engine = run(
            arrivals,
            mode=mode,
            num_pages=13,
            max_model_len=40,
            num_drafts=k,
            max_num_batched_tokens=40,
            accept=accept_some(k),
        )
        check_texts(arrivals, requests, 40)
        preemptions += engine.stats.preemptions
    assert preemptions >= 6


@pytest.mark.parametrize("k", [0, 3])
def test_the_same_trace_gives_the_same_plans(k):
    options = {"num_pages": 13, "max_model_len": 40, "num_drafts": k, "accept": accept_some(k)}
    logs = [run(crowd(1), **options)[1].log for _ in range(2)]
    assert logs[0] == logs[1] and len(logs[0]) > 20


def test_pages_and_rows_are_handed_on():
    """More requests than rows and than pages: each is used by several, and none by two at once."""
    arrivals = crowd(3, count=20)
    requests, runner, _ = run(arrivals, num_pages=16, max_model_len=40, max_num_seqs=2)
    check_texts(arrivals, requests, 40)
    users = {}
    for _, rows in runner.log:
        for name, row, *_, pages in rows:
            users.setdefault(("row", row), set()).add(name)
            for page in pages:
                users.setdefault(("page", page), set()).add(name)
    assert all(len(names) > 2 for names in users.values())


def test_br_09_a_prompt_that_fills_the_pool_comes_back_and_hits():
    """10 pages with the dummy, 16 tokens each, n = 130: run, pre-empt, re-admit with 128 tokens still cached."""
    prompt = [i % VOCAB for i in range(130)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    for k in (0, 3, 5):
        runner = FakeRunner(
            num_pages=10,
            page_tokens=16,
            max_model_len=144,
            num_drafts=k,
            max_num_batched_tokens=50,
            accept=accept_some(k),
        )
        engine = EngineCore(runner, eos_token_ids=[EOS])
        request = engine.add(prompt, params)
        while len(request.output) < 3:
            engine.step()
        kept = list(request.pages)
        engine.scheduler.preempt(request)
        while request.status == "waiting":
            engine.step()
        assert request.matched == 128 and request.pages[:8] == kept[:8] and len(request.pages) == 9
        assert request.cached_tokens == 0, "reported once, at the first admission"
        engine.drain()
        assert request.output == expected(prompt, params, 144)[0]
        engine.scheduler.check()
        assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("mode", ["overlap", "sync"])
@pytest.mark.parametrize("k", [0, 3, 5])
def test_a_hit_gives_the_same_text(k, mode):
    """Prompts that share pages with one that runs: none, a part, the whole; equal to what they are alone."""
    base = [(7 * i) % VOCAB for i in range(16)]
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    arrivals = [Arrival(0, base + [1], long)]
    for n in (3, 4, 5, 8, 9, 15, 16):
        arrivals += [Arrival(3, base[:n], GREEDY), Arrival(3, base[:n] + [2, 3, 5], GREEDY)]
    options = {
        "num_pages": 64,
        "num_drafts": k,
        "accept": accept_some(k),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
    }
    requests, _, _ = run(arrivals, mode=mode, **options)
    check_texts(arrivals, requests, 64)
    cached = {len(r.prompt): r.cached_tokens for r in requests.values() if r.prompt == base[: len(r.prompt)]}
    assert cached == {3: 0, 4: 3, 5: 4, 8: 7, 9: 8, 15: 12, 16: 15}


def test_every_place_to_end():
    """Prompt lengths and limits around page edges and the end of the context, each alone and with k drafts."""
    for k in (0, 3):
        for num_prompt in (1, 3, 4, 5, 7, 8, 9, 14, 15):
            for max_tokens in (1, 2, 3, 4, 5, None):
                arrivals = [
                    Arrival(
                        0,
                        list(range(1, num_prompt + 1)),
                        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                    )
                ]
                options = {
                    "num_pages": 5,
                    "max_model_len": 16,
                    "max_num_seqs": 2,
                    "num_drafts": k,
                    "accept": lambda _, k=k: k + 1,
                }
                requests, _, _ = run(arrivals, **options)
                check_texts(arrivals, requests, 16)
                want = min(max_tokens or 16, 16 - num_prompt)
                assert len(requests[0].output) == want and requests[0].finish_reason == "length"


def test_overlap_runs_one_step_ahead_and_no_more():
    runner = FakeRunner()
    engine = EngineCore(runner, eos_token_ids=[])
    request = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    assert engine.step() == [] and len(runner.log) == 1 and request.output == []
    (delta,) = engine.step()
    assert len(runner.log) == 2 and delta.token_ids == request.output and not delta.finished
    (delta,) = engine.step()
    assert len(runner.log) == 2, "its last token was in flight: nothing more to dispatch"
    assert delta.finished and delta.token_ids == request.output[1:] and not engine.has_work
    assert engine.step() == []


def test_abort_in_every_state():
    runner = FakeRunner(max_num_seqs=1)
    engine = EngineCore(runner, eos_token_ids=[])
    running = engine.add([1, 2, 3], GREEDY, request_id="running")
    waiting = engine.add([4, 5], GREEDY, request_id="waiting")
    engine.step()
    assert engine.abort("nobody") is None
    delta = engine.abort("waiting")
    assert (delta.request, delta.token_ids, delta.finished) == (waiting, [], True)
    engine.abort("running")
    assert engine.abort("running") is None
    assert running.finish_reason == "abort" and engine.has_work
    assert engine.scheduler.pool.num_used == 1, "a step in flight may still write the page"
    assert engine.step() == [] and running.output == [] and not engine.has_work
    assert engine.scheduler.pool.num_used == 0
    assert engine.stats.finished == {"stop": 0, "length": 0, "abort": 2}


def test_abort_all_and_drain():
    engine = EngineCore(FakeRunner(max_num_seqs=2), eos_token_ids=[])
    requests = [engine.add([i + 1], GREEDY) for i in range(3)]
    engine.step()
    engine.step()
    assert [delta.request for delta in engine.abort_all()] == requests
    assert engine.drain() == [] and not engine.has_work
    again = engine.add([1, 2], GREEDY)
    deltas = engine.drain()
    assert [token for delta in deltas for token in delta.token_ids] == again.output and deltas[-1].finished


class Letters:
    """Text of one letter a token; stops at the strings given."""

    def __init__(self, *stops):
        self.stops, self.text, self.stop_hit, self.ended = stops, "", None, False

    def push(self, token_id):
        assert not self.ended
        self.text += chr(ord("A") + token_id)
        self.stop_hit = next((stop for stop in self.stops if self.text.endswith(stop)), None)

    def finish(self):
        self.ended = True


def first_tokens(count):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens, _ = expected([1, 2, 3], params, 64)
    assert len(set(tokens)) == count, "the cases below need tokens that differ"
    return tokens


@pytest.mark.parametrize("k", [0, 3])
def test_what_ends_a_text(k):
    """End of text, stop ids, stop strings and the limit, in this order; what was accepted after it is dropped."""
    tokens = first_tokens(7)
    letters = [chr(ord("A") + token) for token in tokens]
    limit = {"temperature": 0, "max_tokens": 7}
    cases = [
        # eos, params, stop strings → tokens kept, reason, stop reason
        ([], limit, (), 7, "length", None),
        ([tokens[2]], limit, (), 3, "stop", None),
        ([tokens[2]], limit | {"ignore_eos": True}, (), 7, "length", None),
        ([tokens[2]], limit | {"stop_token_ids": [tokens[2]]}, (), 3, "stop", None),
        ([tokens[2]], limit | {"stop_token_ids": [tokens[2]], "ignore_eos": True}, (), 3, "stop", tokens[2]),
        ([], limit | {"stop_token_ids": [tokens[4]]}, (), 5, "stop", tokens[4]),
        ([], limit, (letters[1] + letters[2],), 3, "stop", letters[1] + letters[2]),
        ([tokens[2]], limit, (letters[2],), 3, "stop", None),
        ([tokens[6]], limit, (), 7, "stop", None),
        ([], limit, (letters[6],), 7, "stop", letters[6]),
    ]
    for eos, params, stops, count, reason, stop_reason in cases:
        runner = FakeRunner(num_drafts=k, accept=lambda _: k + 1)
        engine = EngineCore(runner, eos_token_ids=eos)
        text = Letters(*stops)
        request = engine.add([1, 2, 3], SamplingParams(**params), text=text)
        deltas = engine.drain()
        assert (request.output, request.finish_reason, request.stop_reason) == (tokens[:count], reason, stop_reason)
        assert sum(len(delta.token_ids) for delta in deltas) == count == engine.stats.generated_tokens
        by_id = reason == "stop" and not isinstance(stop_reason, str)
        assert text.text == "".join(letters[: count - by_id]) and text.ended
        assert engine.stats.finished[reason] == 1


def test_min_tokens():
    """The runner masks ends before it; here they come all the same, and are tokens like others."""
    tokens = first_tokens(7)
    runner = FakeRunner()
    engine = EngineCore(runner, eos_token_ids=tokens[2:4])
    request = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=7, min_tokens=3))
    engine.drain()
    assert request.output == tokens[:4]
    arrivals = [Arrival(0, [1, 2, 3], SamplingParams(temperature=0, max_tokens=40, min_tokens=39))]
    requests, _, _ = run(arrivals)
    check_texts(arrivals, requests, 64)
    assert len(requests[0].output) >= 40


def test_seeds_and_choices():
    def seeds(engine_seed):
        engine = EngineCore(FakeRunner(), eos_token_ids=[], seed=engine_seed)
        pair = SamplingParams(n=2)
        drawn = [engine.add([1], pair, choice=choice) for _ in range(2) for choice in range(2)]
        return engine, [request.seed for request in drawn], [request.choice for request in drawn]

    engine, drawn, choices = seeds(1)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3] and choices == [0, 1, 0, 1]
    assert seeds(1)[1] == drawn and seeds(2)[1] != drawn
    assert all(0 <= seed < 2**32 for seed in drawn)
    for seed, used in ((5, 5), (2**32 - 1, 2**32 - 1), (2**32, 1), (-(2**63), 2**31)):
        assert engine.add([1], SamplingParams(seed=seed)).seed == used
    for choice in (-1, 2):
        with pytest.raises(RequestError, match=f"choice: got {choice}"):
            engine.add([1], SamplingParams(n=2), choice=choice)
    # The runner is told both: same seed, another choice, another text.
    engine = EngineCore(FakeRunner(), eos_token_ids=[])
    params = SamplingParams(n=2, seed=5, max_tokens=8)
    texts = [engine.add([1], params, choice=choice) for choice in range(2)]
    engine.drain()
    assert texts[0].output != texts[1].output


def test_a_refused_request_leaves_nothing_behind():
    engine = EngineCore(FakeRunner(num_pages=4), eos_token_ids=[])
    for prompt in ([], [1] * 64, [1] * 12):
        with pytest.raises(RequestError):
            engine.add(prompt, GREEDY, request_id="a")
    assert not engine.has_work
    request = engine.add([1], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="request_id: 'a' belongs to a request that is not finished"):
        engine.add([1], GREEDY, request_id="a")
    engine.drain()
    assert request.finish_reason == "length"
    assert engine.add([1], GREEDY, request_id="a").id == "a"


@pytest.mark.parametrize("k", [0, 3])
def test_stats_and_times(k):
    ticks = iter(range(10**6))
    runner = FakeRunner(num_drafts=k, accept=lambda length: 1 + length % (k + 1))
    engine = EngineCore(runner, eos_token_ids=[], clock=lambda: next(ticks))
    params = SamplingParams(temperature=0, max_tokens=9)
    requests = [engine.add([n] * n, params) for n in (4, 30)]
    assert engine.stats.waiting == 2 and engine.stats.page_usage == 0
    engine.step()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.steps) == (2, 0, 1)
    assert (stats.step_prompt_tokens, stats.step_decode_tokens) == (32, 0)
    assert stats.prompt_tokens == 34 and 0 < stats.page_usage < 1
    engine.step()
    assert (engine.stats.step_prompt_tokens, engine.stats.step_decode_tokens) == (2, k + 1)
    first = [(r.metrics.first_scheduled, r.metrics.first_token) for r in requests]
    assert first[0][0] == first[1][0] and first[0][1] is not None and first[1][1] is None
    engine.drain()
    assert (requests[0].metrics.first_scheduled, requests[0].metrics.first_token) == first[0]
    stats = engine.stats
    counts = stats.acceptance
    assert (stats.generated_tokens, stats.finished["length"], stats.preemptions) == (18, 2, 0)
    assert (stats.running, stats.waiting, stats.page_usage) == (0, 0, 0)
    if k:
        # Each text: one token from its last chunk, the others from decode rows, of which the last may have no room for a
        # draft and not count.
        assert 18 - 2 - 2 <= counts.num_rows + sum(counts.accepted) <= 18 - 2
        assert list(counts.verified) == sorted(counts.verified, reverse=True)
        assert sum(counts.accepted) > 0
        assert list(counts.accepted) == sorted(counts.accepted, reverse=True)
    else:
        assert counts == Acceptance((), ())
    for request in requests:
        times = request.metrics
        assert times.arrival < times.first_scheduled < times.first_token < times.finished


def test_logprobs_go_with_their_tokens():
    engine = EngineCore(FakeRunner(num_drafts=3, accept=lambda _: 3), eos_token_ids=[])
    some, every, none = (
        engine.add([1, 2], SamplingParams(temperature=0, max_tokens=9, logprobs=n)) for n in (2, -1, None)
    )
    engine.drain()
    assert none.logprobs == []
    for request, count in ((some, 2), (every, VOCAB)):
        assert [-entry.chosen for entry in request.logprobs] == request.output
        assert [entry.rank - 1 for entry in request.logprobs] == request.output
        assert [[(token + i) % VOCAB for i in range(count)] for token in request.output] == [
            list(entry.ids) for entry in request.logprobs
        ]
        assert all(list(entry.values) == [-i for i in range(count)] for entry in request.logprobs)
