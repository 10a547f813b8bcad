"""Every request of random mixes gets the text of the plain forward, whatever runs beside it and however it is cut."""

import dataclasses
import random

import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.host.request import Request
from models import dense
from tests.engine import small

LENGTH = 64  # max_model_len
PAGE = 8
NEAR = 1e-4  # a choice closer than this may fall either way in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"))


def make(folder, dcp: int, **more) -> LLM:
    """13 pages hold less than two of the longest requests; few tokens a step cut prompts anywhere."""
    llm = LLM(
        folder,
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=PAGE // dcp if dcp > 1 else 1,
        block_size=PAGE,
        num_blocks=13,
        max_model_len=LENGTH,
        max_num_seqs=4,
        **({"max_num_batched_tokens": 13} | more),
    )
    llm.warm_up()
    return llm


@pytest.fixture(scope="module")
def alone(folder):
    return make(folder, 1)


@pytest.fixture(scope="module")
def sharded(folder):
    """Three drafts a step, which only this engine makes."""
    speculative = {"num_speculative_tokens": 3, "draft_kv": "replicated"}
    return make(folder, 4, max_num_batched_tokens=17, speculative_config=speculative)


@pytest.fixture(params=["alone", "sharded"])
def llm(request):
    """Both engines; each test must leave them idle, with every page free, and compile nothing."""
    llm = request.getfixturevalue(request.param)
    compiled = llm.runner.num_compiled
    assert compiled >= len(llm.runner.buckets.shapes)  # engines on one mesh share their programs
    yield llm
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_used == 0
    assert llm.runner.num_compiled == compiled


@dataclasses.dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams


def greedy_mix(rng: random.Random) -> list[Arrival]:
    """1 … 6 requests; prompts and ends like to lie at the edges of pages and of the context."""
    arrivals = []
    for _ in range(rng.randint(1, 6)):
        size = rng.choice([rng.randint(1, LENGTH - 1), rng.randint(1, 20), PAGE - 1, PAGE, 2 * PAGE, LENGTH - 1])
        left = LENGTH - size
        to_edge = min(left, -size % PAGE or PAGE)
        tokens = rng.choice([rng.randint(1, left), to_edge, min(to_edge + 1, left), left, None])
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=rng.random() < 0.7)
        prompt = [rng.randrange(small.VOCAB) for _ in range(size)]
        arrivals.append(Arrival(rng.choice([0, 0, rng.randint(1, 30)]), prompt, params))
    return sorted(arrivals, key=lambda arrival: arrival.step)


def play(llm: LLM, arrivals: list[Arrival], mode: str) -> list[Request]:
    """Runs a mix to its end. mode: "overlap", "sync", or "mixed": now one, now the other."""
    engine, requests, now = llm.engine, [], 0
    while len(requests) < len(arrivals) or engine.has_work:
        while len(requests) < len(arrivals) and arrivals[len(requests)].step <= now:
            arrival = arrivals[len(requests)]
            requests.append(engine.add(arrival.prompt, arrival.params))
        if mode == "sync" or (mode == "mixed" and now % 3 == 0):
            engine.step_sync()
        else:
            engine.step()
        engine.scheduler.check()
        now += 1
    assert engine.scheduler.pool.num_used == 0
    return requests


def check_greedy(request: Request) -> bool:
    """Asserts that the text is the oracle's; True if it leaves it where the oracle's own choice was too close."""
    prompt, output = request.prompt, request.output
    logits, margins = small.oracle(prompt + output)
    want = np.argmax(logits[len(prompt) - 1 : -1], axis=-1)
    wrong = np.flatnonzero(want != output)
    if wrong.size:
        at = len(prompt) - 1 + wrong[0]
        near = min(margins.logits[at], margins.selection[at], margins.experts[at])
        assert near < NEAR, f"{request.id}: token {wrong[0]} is {output[wrong[0]]}, the oracle's is {want[wrong[0]]}"
        return True
    ends = set() if request.params.ignore_eos else set(small.EOS)
    assert not ends & set(output[:-1])
    assert request.finish_reason == ("stop" if output[-1] in ends else "length")
    assert request.finish_reason == "stop" or request.num_tokens == request.limit
    return False


@pytest.mark.parametrize("mode", ["overlap", "sync", "mixed"])
def test_random_mixes(llm, mode):
    rng = random.Random(f"{mode} 1")
    before, requests = llm.engine.stats, []
    for _ in range(30):
        requests += play(llm, greedy_mix(rng), mode)
    forgiven = sum(map(check_greedy, requests))
    assert len(requests) >= 90 and forgiven <= len(requests) / 100

    # What the mixes are for did happen.
    assert llm.engine.stats.preemptions - before.preemptions >= 10
    assert {r.finish_reason for r in requests} == {"stop", "length"}
    totals = {r.num_tokens for r in requests}
    assert LENGTH in totals and {n % PAGE for n in totals} == set(range(PAGE))
    assert len({tuple(r.output) for r in requests if len(r.output) > 4}) > len(requests) / 3


def test_the_oracle_is_what_the_plain_forward_generates(alone):
    rng = random.Random(2)
    for size in (1, 8, 37):
        prompt = [rng.randrange(small.VOCAB) for _ in range(size)]
        params = SamplingParams(temperature=0, max_tokens=20)
        (request,) = play(alone, [Arrival(0, prompt, params)], "overlap")
        assert request.output == dense.generate(small.params(), prompt, 20, small.CONFIG, eos=small.EOS)


def sampled_mix() -> list[Arrival]:
    rng = random.Random(3)
    kinds = [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.5}, {"temperature": 2.0}]
    return [
        Arrival(
            step=rng.randint(0, 10),
            prompt=[rng.randrange(small.VOCAB) for _ in range(rng.randint(1, 30))],
            params=SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "seed": i % 4, "ignore_eos": True, **kind}),
        )
        for i, kind in enumerate(kinds * 2)
    ]


def test_sampled_texts_depend_on_the_request_alone(alone, sharded):
    """The same seed gives the same text alone, in company, read at once or late, on one device or four."""
    mix = sampled_mix()
    mix.sort(key=lambda arrival: arrival.step)
    texts = [play(alone, [arrival], "sync")[0].output for arrival in mix]
    assert len({tuple(text) for text in texts}) == len(texts)
    for llm in (alone, sharded):
        before = llm.engine.stats.preemptions
        for mode in ("overlap", "sync"):
            assert [request.output for request in play(llm, mix, mode)] == texts
        assert llm.engine.stats.preemptions > before
    other = dataclasses.replace(mix[0], params=dataclasses.replace(mix[0].params, seed=99))
    assert play(alone, [other], "sync")[0].output != texts[0]
