"""DCP × interleave × drafts × draft layout × prefix × chunking × overlap: the text is the plain forward's, token for token.

Each row is one engine; prefixes run inside it, and so do chunk sizes, both loops, greedy and sampled requests. By default
rows cover every pair of dcp, interleave, k and draft layout, and ways every pair of the others; `-m matrix` runs the rest
of the full product.
"""

import functools
import gc
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.engine import EngineCore
from dcpjax.host.request import Request
from dcpjax.host.speculation import Acceptance
from dcpjax.sampling import SamplingRows, log_weights, noise
from tests.engine import small

PAGE, LENGTH, NEW = 16, 96, 20
CHUNKS = {"one": 64, "many": 12}
NEAR = 1e-3  # every token of the references is chosen with more room than this, so that no last bit decides


class Row(NamedTuple):
    dcp: int
    turn: bool  # interleave: page / dcp tokens, else 1
    k: int
    draft_kv: str

    def __str__(self):
        return f"dcp{self.dcp}-{'turn' if self.turn else 'one'}-k{self.k}-{self.draft_kv}"


VALUES = {"dcp": (2, 4, 8), "turn": (False, True), "k": (0, 1, 3, 5), "draft_kv": ("sharded", "replicated")}
ALONE = [Row(1, False, k, "sharded") for k in VALUES["k"]]  # with one rank nothing is dealt out
PRODUCT = [*ALONE, *map(Row._make, itertools.product(*VALUES.values()))]
ROWS = [
    Row(1, False, 3, "sharded"),
    Row(2, False, 0, "sharded"),
    Row(2, True, 1, "replicated"),
    Row(2, False, 3, "replicated"),
    Row(2, True, 5, "sharded"),
    Row(4, True, 0, "replicated"),
    Row(4, False, 1, "sharded"),
    Row(4, True, 3, "sharded"),
    Row(4, False, 5, "replicated"),
    Row(8, False, 0, "replicated"),
    Row(8, True, 1, "sharded"),
    Row(8, False, 3, "replicated"),
    Row(8, True, 5, "sharded"),
]


def pairs(row: Row) -> set[tuple]:
    return {(a, getattr(row, a), b, getattr(row, b)) for a, b in itertools.combinations(VALUES, 2)}


def test_the_rows_cover_every_pair():
    assert set().union(*map(pairs, ROWS)) >= set().union(*map(pairs, PRODUCT[len(ALONE) :]))
    assert len(PRODUCT) == 4 + 3 * 2 * 4 * 2


# --- prompts and their texts ----------------------------------------------------------------------------------------


def ids(size: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, small.VOCAB, size).tolist())


COLD = ids(37, 1)
PARTIAL = COLD[: 2 * PAGE] + ids(13, 2)
WHOLE = COLD[: 2 * PAGE]
SHORT = ids(5, 4)


def params_of(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=NEW, ignore_eos=True)


@functools.cache
def text_of(prompt: tuple[int, ...], temperature: float) -> list[int]:
    """The plain forward's text in float64, drawn with the noise of seed 11."""
    rows = SamplingRows.neutral(1).replace(seed=jnp.array([11], jnp.uint32), temperature=jnp.full(1, temperature))
    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + NEW):
        logits, _ = small.oracle(tokens)
        scores = logits[-1].astype(np.float64)
        if temperature:
            scores = scores + np.asarray(noise(rows, jnp.array([position]), jnp.arange(small.VOCAB)))[0]
        second, first = np.sort(scores)[-2:]
        assert first - second > NEAR, (len(prompt), position)
        tokens.append(int(np.argmax(scores)))
    return tokens[len(prompt) :]


def test_the_reference_draws_as_sampling_says():
    """At temperature 1 weights are the logits, so the reference is the definition."""
    rows = SamplingRows.neutral(1).replace(temperature=jnp.ones(1))
    logits = jnp.asarray(small.oracle(list(COLD))[0][-1:], jnp.float32)
    np.testing.assert_allclose(log_weights(logits, rows), logits - logits.max(), atol=1e-6)
    assert text_of(COLD, 1.0) != text_of(COLD, 0.0)


# --- the engines ----------------------------------------------------------------------------------------------------


class Narrow:
    """A runner for which the scheduler may put fewer tokens into a step: prompts are cut in more places."""

    def __init__(self, runner: Any, max_num_batched_tokens: int):
        self._runner, self.max_num_batched_tokens = runner, max_num_batched_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(
    scope="module",
    params=[*ROWS, *(pytest.param(row, marks=pytest.mark.matrix) for row in PRODUCT if row not in ROWS)],
    ids=str,
)
def engines(request, folder, quick_compile):
    """A row, and what makes engines over its runner."""
    row = request.param
    llm = LLM(
        folder,
        decode_context_parallel_size=row.dcp,
        cp_kv_cache_interleave_size=PAGE // row.dcp if row.turn else 1,
        block_size=PAGE,
        num_blocks=16,
        max_model_len=LENGTH,
        # One row slot needs half of the programs; the other rows of the product run two requests at once.
        max_num_seqs=1 if row in ROWS else 2,
        max_num_batched_tokens=CHUNKS["one"],
        speculative_config={"method": "mtp", "num_speculative_tokens": row.k, "draft_kv": row.draft_kv},
    )

    def make(chunk: str) -> EngineCore:
        return EngineCore(Narrow(llm.runner, CHUNKS[chunk]), eos_token_ids=small.EOS)

    yield row, make
    llm = None  # pools and programs of many engines would pile up
    gc.collect()
    jax.clear_caches()


def play(engine: EngineCore, mode: str, temperature: float, *prompts: tuple[int, ...]) -> list[Request]:
    requests = [engine.add(prompt, params_of(temperature)) for prompt in prompts]
    while engine.has_work:
        engine.step() if mode == "overlapped" else engine.step_sync()
        engine.scheduler.check()
    return requests


# Drafts verified and accepted per place by (k, chunk, mode, temperature): the same in every layout.
ACCEPTED: dict[tuple, Acceptance] = {}


WAYS = list(itertools.product(CHUNKS, (0.0, 1.0), ("sync", "overlapped")))
# Every pair of two of the three.
USUAL = [("one", 0.0, "sync"), ("one", 1.0, "overlapped"), ("many", 0.0, "overlapped"), ("many", 1.0, "sync")]


@pytest.mark.parametrize(
    ("chunk", "temperature", "mode"),
    [way if way in USUAL else pytest.param(*way, marks=pytest.mark.matrix) for way in WAYS],
)
def test_product(engines, chunk, temperature, mode):
    row, make = engines
    engine, cached = make(chunk), []

    def check(*prompts):
        for request in play(engine, mode, temperature, *prompts):
            assert request.output == text_of(tuple(request.prompt), temperature), request.prompt
            cached.append(request.cached_tokens)

    check(COLD)
    check(PARTIAL)
    check(WHOLE)
    turn = COLD + tuple(text_of(COLD, temperature)[:12])  # 49 tokens: the next turn of a chat
    check(turn)
    check(COLD, PARTIAL, WHOLE, SHORT)  # one after the other or in company, warm but for the last
    assert cached == [0, 2 * PAGE, 2 * PAGE - 1, 3 * PAGE, 2 * PAGE, 2 * PAGE, 2 * PAGE - 1, 0]

    counts, k = engine.stats.acceptance, row.k
    assert ACCEPTED.setdefault((k, chunk, mode, temperature), counts) == counts
    assert k == 0 or (sum(counts.accepted) > 0 and counts.num_rows + sum(counts.accepted) >= 8 * (NEW - 2))
