"""Grammars in the one step: the text is in the grammar, and the same with drafts, without, in company and after pre-emption."""

import json
import re

import jsonschema
import pytest

from dcpjax import LLM, SamplingParams
from dcpjax.errors import RequestError
from dcpjax.grammar import AllOf, BadWords, Grammars, Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96, "block_size": 16}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
PROMPTS = ["The animal is", "Tell me about legs:", "x"]


@pytest.fixture(scope="module")
def drafting(quick_compile):
    return LLM(decode_context_parallel_size=2, speculative_config=DRAFTS, **SIZES)


@pytest.fixture(scope="module")
def plain(quick_compile):
    return LLM(**SIZES)


def grammars(llm) -> Grammars:
    return Grammars(Vocabulary(llm.tokenizer, llm.config.vocab_size, tuple(sorted(llm.engine.eos_token_ids))))


def texts(llm, jobs, preempt: bool = False) -> list[str]:
    """Of (prompt, rules or None, params), all at once. preempt: all of them once, in the midst."""
    requests = [llm.add(llm.tokenizer.encode(prompt), params, grammar=rules) for prompt, rules, params in jobs]
    if preempt:
        for _ in range(9):
            llm.engine.step()
        before = llm.engine.stats.preemptions
        assert llm.engine.reset_prefix_cache(running=True)
        assert llm.engine.stats.preemptions >= before + 2
    llm.engine.drain()
    llm.engine.scheduler.check()
    return [request.text.text for request in requests]


def beginnings(llm, word: str) -> list[list[int]]:
    """The single tokens with which the word can begin."""
    ids = [llm.tokenizer.encode(word[:n]) for n in range(1, len(word) + 1)]
    return [each for each in ids if len(each) == 1]


def jobs(llm, temperature: float):
    """A schema, a pattern, free text and a choice, side by side."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    made = grammars(llm)
    rules = [
        made.json_schema(SCHEMA, "x").rules(),
        made.regex("[a-z]{3,8}( [a-z]{3,8}){2,4}\\.", "x").rules(),
        None,
        AllOf(made.choice(["yes", "no way"], "x").rules(), BadWords(beginnings(llm, "yes"))),
    ]
    return [(PROMPTS[i % 3], each, params) for i, each in enumerate(rules)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_in_their_grammar_and_equal_without_drafts(drafting, plain, temperature):
    got = texts(drafting, jobs(drafting, temperature))
    jsonschema.validate(json.loads(got[0]), SCHEMA)
    assert re.fullmatch("[a-z]{3,8}( [a-z]{3,8}){2,4}\\.", got[1])
    assert not re.fullmatch("[a-z ]*\\.", got[2]), "what is free is not bound"
    assert got[3] == "no way"
    assert texts(plain, jobs(plain, temperature)) == got
    assert [texts(drafting, [job])[0] for job in jobs(drafting, temperature)] == got, "alone"
    assert texts(drafting, jobs(drafting, temperature), preempt=True) == got


def test_a_grammar_wins_over_words_that_leave_nothing(plain):
    rules = AllOf(grammars(plain).choice(["yes"], "x").rules(), BadWords(beginnings(plain, "yes")))
    assert texts(plain, [("x", rules, SamplingParams(temperature=0, max_tokens=9))]) == ["yes"]


def test_drafts_are_verified_under_a_grammar(drafting):
    """A text that the grammar forces word by word is the model's own wish at every place, in the end."""
    forced = "The quick brown fox jumps over the lazy dog."
    before = drafting.engine.stats.acceptance
    rules = grammars(drafting).choice([forced], "x").rules()
    assert texts(drafting, [("Say: " + forced, rules, SamplingParams(temperature=0, max_tokens=60))]) == [forced]
    now = drafting.engine.stats.acceptance - before
    assert now.num_rows and sum(now.verified) >= now.num_rows


def test_thinking_is_free_until_its_end(plain):
    """Thinking may be anything, but the turn does not end with it."""
    params = SamplingParams(temperature=0, max_tokens=60)
    prompt = plain.tokenizer.apply_chat_template([{"role": "user", "content": "What is 3 plus 4?"}])
    rules = grammars(plain).choice(["seven it is"], "x").rules(thinking_ends="</think>")
    request = plain.add(plain.tokenizer.encode_chat(prompt), params, grammar=rules)
    plain.engine.drain()
    thinking, end, rest = request.text.text.partition("</think>")
    assert thinking and end and rest == "seven it is" and request.finish_reason == "stop"


def test_only_allowed_tokens(plain):
    ids = plain.tokenizer.encode("abc")
    params = SamplingParams(temperature=1, max_tokens=12, allowed_token_ids=ids, seed=1)
    assert set(plain.generate(["x"], params)[0].outputs[0].token_ids) <= set(ids)
    with pytest.raises(RequestError, match="allowed_token_ids"):
        plain.generate(["x"], SamplingParams(allowed_token_ids=[99999]))
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])
