"""`LLM`: the forms of a prompt, choices, stops, log-probabilities, penalties, traces, and changed weights."""

import dataclasses
import math
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import CacheFullError, CheckpointError, ConfigError, RequestError
from tests.engine import small

pytestmark = pytest.mark.usefixtures("quick_compile")

ENGINE = {
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "block_size": 8,
    "num_blocks": 17,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
}
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 58, 9, 7, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small.write_checkpoint(tmp_path_factory.mktemp("small"), tokenizer=True)


@pytest.fixture(scope="module")
def module_llm(folder):
    return LLM(folder, **ENGINE)


@pytest.fixture
def llm(module_llm):
    """One engine for all tests; each leaves it idle, with every page free."""
    yield module_llm
    assert not module_llm.engine.has_work
    assert module_llm.engine.scheduler.pool.num_used == 0
    module_llm.engine.scheduler.check()


def one(llm, prompt=PROMPT, params=GREEDY, **changes):
    (result,) = llm.generate(prompt, dataclasses.replace(params, **changes))
    (choice,) = result.outputs
    return choice


def raw_logits(llm, tokens):
    return llm.trace(tokens).logits


# --- prompts and choices ------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt(llm):
    text = llm.tokenizer.decode(PROMPT)
    assert llm.tokenizer.encode(text) == PROMPT
    want = one(llm).token_ids
    single = [text, PROMPT, tuple(PROMPT), np.array(PROMPT)]
    for prompt in single:
        (result,) = llm.generate(prompt, GREEDY)
        assert result.prompt_token_ids == PROMPT and result.outputs[0].token_ids == want
    other = [1, 2, 3]
    for prompts in ([text, llm.tokenizer.decode(other)], [PROMPT, other], [np.array(PROMPT), np.array(other)]):
        first, second = llm.generate(prompts, [GREEDY, dataclasses.replace(GREEDY, max_tokens=4)])
        assert (first.prompt_token_ids, second.prompt_token_ids) == (PROMPT, other)
        assert first.outputs[0].token_ids == want and len(second.outputs[0].token_ids) == 4
    assert llm.generate([], GREEDY) == []
    assert len(one(llm, params=SamplingParams()).token_ids) <= 16  # the defaults serve too


def test_numbers_are_python_numbers(llm):
    (result,) = llm.generate(np.array(PROMPT, np.int32), dataclasses.replace(GREEDY, logprobs=1))
    choice = result.outputs[0]
    for number in (*result.prompt_token_ids, *choice.token_ids, result.num_cached_tokens, choice.index):
        assert type(number) is int
    assert {type(x.rank) for x in choice.logprobs} == {int} and {type(x.chosen) for x in choice.logprobs} == {float}
    times = result.metrics
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished


def test_choices_differ_and_repeat(llm):
    params = SamplingParams(temperature=1, seed=7, n=3, max_tokens=16, ignore_eos=True)
    (result,) = llm.generate(PROMPT, params)
    texts = [choice.token_ids for choice in result.outputs]
    assert [choice.index for choice in result.outputs] == [0, 1, 2]
    assert len({tuple(text) for text in texts}) == 3
    assert [choice.token_ids for choice in llm.generate(PROMPT, params)[0].outputs] == texts
    # Choice 0 is the text of n = 1.
    assert one(llm, params=params, n=1).token_ids == texts[0]
    # Without a seed the engine draws another for each prompt.
    unseeded = dataclasses.replace(params, seed=None, n=1)
    first, second = llm.generate([PROMPT, PROMPT], unseeded)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_a_bad_request_runs_nothing(llm):
    for prompts, params, field in (
        ([PROMPT, []], GREEDY, "prompt"),
        ([PROMPT, [small.VOCAB]], GREEDY, "prompt"),
        ([PROMPT, [-1]], GREEDY, "prompt"),
        ([PROMPT, [1] * 64], GREEDY, "prompt"),
        (PROMPT, dataclasses.replace(GREEDY, stop_token_ids=(64,)), "stop_token_ids"),
        (PROMPT, dataclasses.replace(GREEDY, stop_token_ids=range(40)), "stop_token_ids"),
        (PROMPT, dataclasses.replace(GREEDY, logit_bias={64: 1.0}), "logit_bias"),
        (PROMPT, dataclasses.replace(GREEDY, logprobs=65), "logprobs"),
        ([PROMPT, PROMPT], [GREEDY], "sampling_params"),
    ):
        steps = llm.engine.stats.steps
        with pytest.raises(RequestError, match=f"^{field}: "):
            llm.generate(prompts, params)
        assert not llm.engine.has_work and llm.engine.stats.steps == steps


# --- ends ---------------------------------------------------------------------------------------------------------


def test_stop_strings(llm):
    text = one(llm).text
    assert len(text) == 16 and text == llm.tokenizer.decode(one(llm).token_ids)
    stop = text[5:8]
    at = text.index(stop)
    choice = one(llm, stop=[stop, "absent"])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == text[:at] and len(choice.token_ids) == at + 3
    assert one(llm, stop=stop, include_stop_str_in_output=True).text == text[: at + 3]
    choice = one(llm, stop="absent")
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("length", None, text)


def test_stop_ids_and_end_of_text(llm):
    ids = one(llm).token_ids
    stop = ids[6]
    cut = ids[: ids.index(stop) + 1]
    choice = one(llm, stop_token_ids=[stop])
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (cut, "stop", stop)

    # A bias makes the end of the text likely; it is kept in the ids and not in the text.
    choice = one(llm, ignore_eos=False, logit_bias={small.EOS[0]: 100})
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ([small.EOS[0]], "stop", None)
    assert choice.text == ""
    assert one(llm, ignore_eos=True, logit_bias={small.EOS[0]: 100}).token_ids == [small.EOS[0]] * 16


def test_min_tokens(llm):
    """No end before min_tokens: the next best token is taken instead, and the end comes right after."""
    params = dataclasses.replace(GREEDY, ignore_eos=False, logit_bias={small.EOS[0]: 100, small.EOS[1]: 99, 20: 98})
    choice = one(llm, params=params, min_tokens=5)
    assert choice.token_ids == [20] * 5 + [small.EOS[0]] and choice.finish_reason == "stop"
    choice = one(llm, params=params, min_tokens=5, stop_token_ids=[20])
    assert len(choice.token_ids) == 6 and not {*small.EOS, 20} & set(choice.token_ids[:5])
    text = one(llm).text
    choice = one(llm, stop=[text[2:4]], min_tokens=10)
    assert text.index(text[2:4]) < 10 and len(choice.token_ids) >= 10


# --- log-probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 3, 20, 21, -1])
def test_logprobs_are_those_of_the_raw_logits(llm, num):
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, top_k=8, presence_penalty=1.0)
    choice = one(llm, params=params, logprobs=num)
    logits = raw_logits(llm, PROMPT + choice.token_ids)[len(PROMPT) - 1 : -1].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    size = small.VOCAB if num == -1 else num
    assert len(choice.logprobs) == 6
    for row, token, entry in zip(want, choice.token_ids, choice.logprobs, strict=True):
        order = np.argsort(-row, kind="stable")
        assert entry.ids.tolist() == order[:size].tolist()
        np.testing.assert_allclose(entry.values, row[order[:size]], atol=1e-4)
        assert math.isclose(entry.chosen, row[token], abs_tol=1e-4)
        assert entry.rank == order.tolist().index(token) + 1
    assert {entry.rank for entry in choice.logprobs} != {1}
    assert one(llm, params=params, logprobs=None).logprobs is None


# --- penalties ----------------------------------------------------------------------------------------------------

PENALTIES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5, "presence_penalty": 0.4},
    {"logit_bias": {5: 2.5, 17: -100, 41: 3.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {9: 2.0}},
]


def penalised(logits, prompt, output, params):
    """The logits that decide the token after `output`."""
    x = logits.astype(np.float64)
    counts = np.bincount(output, minlength=small.VOCAB)
    seen = (counts > 0) | np.isin(np.arange(small.VOCAB), prompt)
    x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x = x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    return x


def check_penalties(llm, prompt, output, params):
    logits = raw_logits(llm, prompt + output)
    for i, token in enumerate(output):
        x = penalised(logits[len(prompt) - 1 + i], prompt, output[:i], params)
        assert token == np.argmax(x) or x.max() - x[token] < 1e-4, f"token {i}"


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: "+".join(p))
def test_penalties(llm, penalty):
    params = dataclasses.replace(GREEDY, max_tokens=24, **penalty)
    output = one(llm, params=params).token_ids
    check_penalties(llm, PROMPT, output, params)
    assert output != one(llm, max_tokens=24).token_ids


def test_rows_do_not_share_penalties(llm):
    """Company in the batch, and whoever had the row before, leave no counts and no bias behind."""
    many = [dataclasses.replace(GREEDY, **penalty) for penalty in PENALTIES] + [GREEDY]
    together = [result.outputs[0].token_ids for result in llm.generate([PROMPT] * 6, many)]
    assert together == [one(llm, params=params).token_ids for params in many]
    assert len(set(map(tuple, together))) == 6


def test_penalties_outlive_preemption(llm):
    """Three requests that grow beyond the pool: counts are made anew from what was generated."""
    before = llm.engine.stats.preemptions
    params = [dataclasses.replace(GREEDY, max_tokens=51, **penalty) for penalty in PENALTIES[:3]]
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:] + [1, 2, 3]]
    results = llm.generate(prompts, params)
    assert llm.engine.stats.preemptions > before
    for prompt, wanted, result in zip(prompts, params, results, strict=True):
        output = result.outputs[0].token_ids
        assert len(output) == 51
        check_penalties(llm, prompt, output, wanted)


# --- looking inside -----------------------------------------------------------------------------------------------


def test_a_trace_takes_and_leaves_nothing(llm):
    """Pages, free list and the text of a request that runs at the same time."""
    want = one(llm, max_tokens=30).token_ids
    request = llm.add(PROMPT, dataclasses.replace(GREEDY, max_tokens=30))
    for step in range(100):
        if not llm.engine.has_work:
            break
        llm.engine.step()
        if step % 4 == 0:
            llm.trace([int(x) for x in np.arange(20) * 7 % 61], 5)
        elif step % 4 == 2:
            llm.draft(PROMPT, 3)
        llm.engine.scheduler.check()  # pages are free, or of the request, or on their way back
    assert request.output == want
    assert one(llm, max_tokens=30).token_ids == want


def test_traces_behind_a_step_in_flight(llm):
    """A text that ends at a stop leaves the next step in flight, and it holds back pages: those of traces too."""
    ids = one(llm).token_ids
    one(llm, stop_token_ids=[ids[6]])
    assert llm.engine.has_work
    for _ in range(4):
        assert llm.trace([1] * 64).logits.shape == (64, small.VOCAB)
    llm.engine.drain()


def test_a_trace_in_chunks_is_a_trace_in_one(llm, folder):
    """40 tokens are two chunks here, and three of 13, 13 and 14 tokens with a smaller budget."""
    tokens = [int(x) for x in np.arange(40) ** 2 % 61]
    traces = [llm.trace(tokens, 3)]
    for budget in (13, 64):
        other = LLM(folder, **{**ENGINE, "max_num_batched_tokens": budget})
        traces.append(other.trace(tokens, 3))
        assert other.draft(tokens, 3).tokens.tolist() == llm.draft(tokens, 3).tokens.tolist()
    for trace in traces[1:]:
        chex.assert_trees_all_equal_shapes_and_dtypes(dataclasses.asdict(trace), dataclasses.asdict(traces[0]))
        for field in ("logits", "hidden_states", "final_hidden", "latent", "mtp_logits", "mtp_hidden"):
            np.testing.assert_allclose(getattr(trace, field), getattr(traces[0], field), atol=1e-4, err_msg=field)
        chex.assert_trees_all_equal(trace.topk, traces[0].topk)
        np.testing.assert_array_equal(trace.mtp_topk, traces[0].mtp_topk)
    logits, _ = small.oracle(tokens)
    np.testing.assert_allclose(traces[0].logits, logits, atol=1e-4)


def test_what_a_trace_refuses(llm):
    for call in (
        lambda: llm.trace([]),
        lambda: llm.trace([small.VOCAB]),
        lambda: llm.trace(PROMPT, -1),
        lambda: llm.trace([1] * 65),
        lambda: llm.draft([1] * 60, 5),
    ):
        with pytest.raises(RequestError, match="^(token_ids|next_token): "):
            call()
    held = llm.engine.scheduler.pool.take(12)
    with pytest.raises(CacheFullError, match="needs 5 blocks, 4 are free"):
        llm.trace([1] * 40)
    llm.engine.scheduler.pool.retire(held, llm.engine.scheduler.epoch)
    assert llm.trace([1] * 64).logits.shape == (64, small.VOCAB)
    assert llm.trace(PROMPT).mtp_logits is None


# --- weights and configuration ------------------------------------------------------------------------------------


def test_set_params(llm):
    """New weights count at once, and the old ones bring the old text back."""
    old, text = llm.params, one(llm).token_ids
    compiled = llm.runner.num_compiled
    try:
        llm.set_params(old.replace(head=-old.head))
        changed = one(llm).token_ids
        assert changed != text
        logits, _ = small.oracle(PROMPT)
        assert changed[0] == np.argmin(logits[-1])
    finally:
        llm.set_params(old)
    assert one(llm).token_ids == text and llm.runner.num_compiled == compiled
    for bad in (
        old.replace(norm=old.norm.astype(jnp.bfloat16)),
        old.replace(norm=jnp.ones(31)),
        old.replace(mtp=None),
        jax.tree.leaves(old),
    ):
        with pytest.raises(ConfigError, match="set_params needs"):
            llm.set_params(bad)
        assert llm.params is llm.runner.params
    assert one(llm).token_ids == text


def test_new_weights_reuse_nothing_of_the_old_ones(llm):
    def cached() -> int:
        return llm.generate(PROMPT, GREEDY)[0].num_cached_tokens

    cached()
    assert [cached(), cached()] == [8, 8]
    llm.set_params(llm.params)
    assert [cached(), cached()] == [0, 8]


def test_prefix_caching_can_be_off(folder):
    llm = LLM(folder, **ENGINE, enable_prefix_caching=False)
    assert [llm.generate(PROMPT, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_hf_overrides(folder):
    """They are laid over config.json, and what the weights do not fit is said."""
    llm = LLM(folder, **ENGINE, hf_overrides={"eos_token_id": 5, "rope_theta": 500.0, "routed_scaling_factor": 2.0})
    assert llm.config.eos_token_ids == (5,) and llm.config.rope_theta == 500 and llm.config.moe.scale == 2
    plain, _ = small.oracle(PROMPT)
    assert np.abs(llm.trace(PROMPT).logits - plain).max() > 1e-2
    with pytest.raises(ConfigError, match="hidden_width"):
        LLM(folder, **ENGINE, hf_overrides={"hidden_width": 1})
    with pytest.raises(CheckpointError, match="another shape"):
        LLM(folder, **ENGINE, hf_overrides={"q_lora_rank": 23})


def test_without_a_tokenizer(tmp_path):
    llm = LLM(small.write_checkpoint(tmp_path), block_size=8, num_blocks=9, max_num_seqs=1, max_num_batched_tokens=16)
    assert llm.tokenizer is None
    assert one(llm, max_tokens=2).text == ""
    for call in (
        lambda: llm.generate("abc", GREEDY),
        lambda: llm.generate(PROMPT, dataclasses.replace(GREEDY, stop="a")),
        lambda: llm.chat([{"role": "user", "content": "abc"}]),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            call()


# --- what cannot be a wish ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", ["hello", {"role": "user", "content": "x"}, [[{"role": "user", "content": "x"}]], ["x"]]
)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(RequestError, match="messages: give one conversation, a list of messages"):
        LLM(num_blocks=4, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16).chat(messages)


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"abc", {"prompt": [1]}, [1.7, 2.2], [5, "a"], ["a", 5], [[1], None], [[1.5]], "text and", [[]]],
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    if prompts == "text and":  # a text is one; a batch that ends in none is not
        prompts = ["ab", None]
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    "name, value", [("stop", 5), ("stop_token_ids", 5), ("logit_bias", [1, 2]), ("stop", {"a": 1})]
)
def test_parameters_of_the_wrong_form_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_huge_wishes_are_served_or_refused(llm):
    assert len(one(llm, top_k=2**40, temperature=1.0, seed=1).token_ids) == 16
    with pytest.raises(RequestError, match="min_tokens"):
        llm.generate(PROMPT, dataclasses.replace(GREEDY, max_tokens=None, min_tokens=10**12))
    for k in (-1, 1.5, "3", True, None):
        with pytest.raises(RequestError, match="k: got"):
            llm.draft(PROMPT, k)


@pytest.fixture
def interrupts():
    """Ctrl-C as in a terminal; a run in the background is started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_waits_for_the_step(llm, monkeypatch):
    """An interrupt inside a step, after the caches were given away, must not lose them."""
    want, run, rang = one(llm).token_ids, type(llm.runner)._run, []

    def interrupted(runner, plan, shape):
        if len(rang) < 1:
            rang.append(shape)
            signal.raise_signal(signal.SIGINT)
        return run(runner, plan, shape)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.runner), "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY)
    assert rang and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.engine.drain()
    assert one(llm).token_ids == want
