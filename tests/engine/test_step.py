"""The compiled step: the packed plan, padding, memory that was never written, rows that are read and not written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax import step as steps
from dcpjax.engine import EngineCore
from dcpjax.host.plan import PlannedRow, StepPlan
from dcpjax.host.request import Request
from dcpjax.step import MAX_STOP_IDS, StepShape
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

PAGE, ROWS = 8, 3
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(
        small.write_checkpoint(tmp_path_factory.mktemp("small")),
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        block_size=PAGE,
        num_blocks=13,
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=16,
    )


def prompt_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, small.VOCAB, size).tolist()


def request_of(prompt, params=GREEDY, **more):
    return Request(id="r", prompt=prompt, params=params, limit=len(prompt) + params.max_tokens, seed=5, **more)


def chunk(request, row, pages, start=0, stop=None, new=True):
    """Prompt tokens start … stop − 1 as a plan's row."""
    prompt = request.prompt
    stop = len(prompt) if stop is None else stop
    last = stop == len(prompt)
    return PlannedRow(
        request, row, stop - start, start, tuple(prompt[start:stop]), -1 if last else prompt[stop], last, new, pages
    )


def decode(request, row, pages, start):
    return PlannedRow(request, row, 1, start, None, -1, True, False, pages)


def run(llm, rows, shape):
    """One step in a bucket of our choice. Tokens, accepted and logits `[B, V]`."""
    output = llm.runner._run(StepPlan(tuple(rows), 1), shape)
    return tuple(np.asarray(x) for x in (output.tokens[:, 0], output.accepted, output.logits[:, : small.VOCAB]))


def set_pools(llm, change):
    """Replaces the target's pools by `change(numpy array)`, laid out as before; what was cached is gone."""
    assert llm.engine.reset_prefix_cache()
    cache = llm.runner.cache

    def put(pool):
        return pool.replace(data=jax.device_put(change(np.array(pool.data)), pool.data.sharding))

    llm.runner.cache = cache.replace(latent=put(cache.latent), index=put(cache.index))


def read_pools(llm, pages):
    cache = llm.runner.cache
    return [np.array(pool.data)[:, list(pages)] for pool in (cache.latent, cache.index)]


def nothing(x):
    return np.full_like(x, np.nan)


# --- the packed plan ----------------------------------------------------------------------------------------------


def test_a_plan_survives_packing():
    params = SamplingParams(
        temperature=0.7, top_k=-1, top_p=0.9, min_p=0.05, presence_penalty=-1.5, frequency_penalty=0.25,
        repetition_penalty=1.1, logit_bias={3: 1.0}, min_tokens=4, max_tokens=9, stop_token_ids=(9, 11), seed=1, n=3,
    )  # fmt: skip
    rich = Request(id="a", prompt=prompt_of(11), params=params, limit=20, seed=2**32 - 2, choice=2, matched=8)
    plain = request_of(prompt_of(5))
    bound = request_of(prompt_of(6))
    bound.grammar = object()  # it counts where a token is sampled
    rows = [decode(plain, 2, (7, 9), 12), chunk(rich, 0, (3, 1), 7, 10), chunk(bound, 1, (4,))]
    shape = StepShape(16, 4, 5)
    packed = steps.pack(StepPlan(tuple(rows), 1), shape, ROWS, small.EOS)
    assert packed.dtype == np.int32 and packed.shape == (shape.size,)
    fields, stops, tokens, pages = (np.asarray(x) for x in steps._unpack(jnp.asarray(packed), shape))
    at = dict(zip(steps._FIELDS, fields, strict=True))

    want = {
        "row": [2, 0, 1, ROWS], "num_tokens": [1, 3, 6, 0], "start": [12, 7, 0, 0], "matched": [0, 8, 0, 0],
        "decode": [1, 0, 0, 0], "emit": [1, 0, 1, 0], "new": [0, 1, 1, 0], "limit": [13, 20, 14, 0],
        "choice": [0, 2, 0, 0], "top_k": [0, 0, 0, 0], "min_len": [0, 15, 0, 0], "biased": [0, 1, 0, 0],
        "keep_vocab": [0, 1, 0, 0], "following": [-1, rich.prompt[10], -1, 0],
        "masked": [0, 0, 1, 0],
    }  # fmt: skip
    for name, values in want.items():
        assert at[name].tolist() == values, name
    assert at["seed"].view(np.uint32).tolist() == [0, 2**32 - 2, 5, 0]
    floats = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "presence": -1.5, "frequency": 0.25, "repetition": 1.1}
    assert set(at) == set(want) | {"seed"} | set(floats)
    for name, value in floats.items():
        assert at[name].view(np.float32)[1] == np.float32(value), name
    assert at["temperature"].view(np.float32)[2] == 0
    assert stops[1, :4].tolist() == [9, 11, *small.EOS] and set(stops[1, 4:]) == {-1}
    assert stops.shape == (4, MAX_STOP_IDS) and set(stops[2]) == {-1}
    # A decode row's token is on the device; its place is empty.
    assert tokens.tolist() == [0, *rich.prompt[7:10], *rows[2].tokens, *[0] * 6]
    assert pages.tolist() == [[7, 9, 0, 0, 0], [3, 1, 0, 0, 0], [4, 0, 0, 0, 0], [0] * 5]


# --- padding and garbage ------------------------------------------------------------------------------------------


def test_a_larger_bucket_changes_nothing(llm):
    """Two prompts, one of them in two chunks, then decode rows, in buckets that fit and in wider ones."""
    a, b = request_of(prompt_of(12, 1)), request_of(prompt_of(3, 2))
    outcomes = []
    # The least bucket first; then more tokens, more rows, wider tables, and all rows at other places.
    for tokens, rows, width, place, pages_a, pages_b in (
        (16, 2, 2, (0, 1), (1, 2), (3,)),
        (40, 5, 9, (2, 0), (7, 4), (11,)),
    ):
        set_pools(llm, nothing)
        shape, small_shape = StepShape(tokens, rows, width), StepShape(rows, rows, width)
        seen = []
        out = run(llm, [chunk(b, place[1], pages_b), chunk(a, place[0], pages_a, 0, 7)], shape)
        assert out[1].tolist() == [1] + [0] * (rows - 1)
        seen.append((out[0][0], out[2][0]))
        out = run(llm, [decode(b, place[1], pages_b, 3), chunk(a, place[0], pages_a, 7, 12, new=False)], shape)
        assert out[1].tolist() == [1, 1] + [0] * (rows - 2)
        seen += [(out[0][i], out[2][i]) for i in range(2)]
        out = run(llm, [decode(b, place[1], pages_b, 4), decode(a, place[0], pages_a, 12)], small_shape)
        seen += [(out[0][i], out[2][i]) for i in range(2)]
        places = llm.runner.places(list(pages_a), np.arange(13))
        latent = np.asarray(llm.runner.cache.latent.data)[:, places[0], places[1]]
        assert np.isfinite(latent).all()
        # Slots after the last token, and the pages of nobody, are as they were.
        others = [page for page in range(13) if page not in (*pages_a, *pages_b)]
        assert all(np.isnan(x).all() for x in read_pools(llm, others))
        last = llm.runner.places(list(pages_a), np.arange(13, 16))
        assert np.isnan(np.asarray(llm.runner.cache.latent.data)[:, last[0], last[1]]).all()
        outcomes.append((seen, latent))
    (seen, latent), (seen_wide, latent_wide) = outcomes
    assert [token for token, _ in seen] == [token for token, _ in seen_wide]
    np.testing.assert_allclose([x for _, x in seen], [x for _, x in seen_wide], atol=1e-4)
    np.testing.assert_allclose(latent, latent_wide, atol=1e-4)
    # And they are right.
    for request, got in ((a, [seen[2], seen[4]]), (b, [seen[0], seen[1], seen[3]])):
        logits, _ = small.oracle(request.prompt + [int(token) for token, _ in got[:-1]])
        np.testing.assert_allclose([x for _, x in got], logits[len(request.prompt) - 1 :], atol=1e-4)


def test_a_step_of_padding_writes_nothing(llm):
    set_pools(llm, nothing)
    before = jax.tree.map(np.array, llm.runner.state)
    _, accepted, _ = run(llm, [], StepShape(16, 2, 2))
    assert not accepted.any()
    assert all(np.isnan(x).all() for x in read_pools(llm, range(13)))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, llm.runner.state))


def test_nothing_at_or_past_the_limit_is_written(llm):
    """Decode rows that a host, ahead of what it has read, sends too far: no token, no slot, no length beyond it."""
    set_pools(llm, nothing)
    request = request_of(prompt_of(6), dataclasses.replace(GREEDY, max_tokens=2))
    shape = StepShape(2, 2, 2)
    run(llm, [chunk(request, 1, (5, 2))], StepShape(16, 2, 2))
    accepted = [run(llm, [decode(request, 1, (5, 2), start)], shape)[1][0] for start in (6, 7, 8, 9)]
    assert accepted == [1, 0, 0, 0]
    assert np.asarray(llm.runner.state.kv_len)[1] == 8
    places = llm.runner.places([5, 2], np.arange(16))
    written = np.isfinite(np.asarray(llm.runner.cache.latent.data)[:, places[0], places[1]]).all(-1)
    assert written[:, :8].all() and not written[:, 8:].any()
    assert all(np.isnan(x).all() for x in read_pools(llm, [p for p in range(13) if p != 5]))


@pytest.mark.parametrize("overlap", [True, False])
def test_pages_that_hold_nothing_are_never_read(llm, overlap):
    """NaN in the dummy page and in every free page, anew after each request that used them."""
    prompts = [prompt_of(size, size) for size in (5, 8, 23)]
    llm.engine.overlap = overlap
    for _ in range(2):
        set_pools(llm, nothing)
        for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            output = result.outputs[0].token_ids
            logits, _ = small.oracle(prompt + output)
            assert np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == output
    llm.engine.overlap = True
    assert all(np.isnan(x).all() for x in read_pools(llm, [0]))


# --- rows that are read and not written ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 17, 23], ids=["whole", "one-more", "more"])
@pytest.mark.parametrize("alive", [True, False], ids=["shared", "revived"])
def test_a_hit_reads_its_pages_and_never_writes_them(llm, size, alive):
    """Two pages of an earlier request, which lives on or has ended, serve a prompt that starts alike.

    The shared rows carry a mark (a last bit or two) that any write, even of equal tokens, would remove.
    """
    prompt = prompt_of(size, 9)
    (cold,) = llm.generate(prompt, GREEDY)
    set_pools(llm, nothing)
    engine = EngineCore(llm.runner, eos_token_ids=())
    first = engine.add(prompt[:16] + prompt_of(3, 1), dataclasses.replace(GREEDY, max_tokens=30))
    while len(first.output) < 3:
        engine.step()
    shared = first.pages[:2]
    if not alive:
        engine.abort(first.id)
        engine.drain()

    def mark(data):
        data[:, shared] *= np.float32(1 + 2**-21)
        return data

    set_pools(llm, mark)
    before = read_pools(llm, shared)
    second = engine.add(prompt, GREEDY)
    while second.status != "finished":
        engine.step()
        engine.scheduler.check()
        if second.status == "running":
            assert second.pages[:2] == shared and second.matched == 16
    assert second.output == cold.outputs[0].token_ids
    assert second.cached_tokens == min(16, size - 1)
    for was, now in zip(before, read_pools(llm, shared), strict=True):
        np.testing.assert_array_equal(was, now)
    engine.abort_all()
    engine.drain()
    assert engine.scheduler.pool.num_used == 0
