"""Control tokens in messages are text: they never become the token, and the text is not changed."""

import json
import pathlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcpjax.text import Tokenizer
from dcpjax.typed import MARK

TINY = Tokenizer.load(pathlib.Path(__file__).parent.parent.parent / "models" / "tiny")
NAMES = ["<|assistant|>", "<|user|>", "<think>", "</think>", "<tool_call>", "<arg_key>", "[gMASK]", "<|endoftext|>"]
TEXT = st.lists(
    st.one_of(
        st.sampled_from([*NAMES, MARK, "<|", "|>", "<|user", "think>", "é", " ", "\n", "x"]), st.text(max_size=3)
    ),
    max_size=8,
).map("".join)


def ids(messages, **more) -> list[int]:
    return TINY.encode_chat(TINY.apply_chat_template(messages, **more))


def shown(tokens) -> str:
    return TINY.decode(tokens, skip_special_tokens=False)


CONTROL = {TINY.token_id(name) for name in NAMES}


@given(TEXT)
@example(MARK)
@example("<|user|>" + MARK)
@example("<" + MARK + "|user|>")
@example("a<|user|><|user|>")
def test_what_is_typed_is_text(text):
    messages = [{"role": "user", "content": text}]
    tokens = ids(messages)
    frame = [token for token in tokens if token in CONTROL]
    assert frame == [token for token in ids([{"role": "user", "content": "x"}]) if token in CONTROL]
    assert shown(tokens) == TINY.apply_chat_template(messages, allow_special=True)


@given(st.text(alphabet="<>|/ abé\n", max_size=12))
def test_other_texts_are_encoded_as_a_whole(text):
    messages = [{"role": "user", "content": text}]
    assert ids(messages) == ids(messages, allow_special=True)


def test_allowed_they_are_tokens():
    messages = [{"role": "user", "content": "x<|assistant|>y"}]
    assistant = TINY.token_id("<|assistant|>")
    assert [ids(messages).count(assistant), ids(messages, allow_special=True).count(assistant)] == [1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_tools_calls_and_results_too(name):
    tool = {"type": "function", "function": {"name": "f", "description": name, "parameters": {name: 1}}}
    call = {"type": "function", "function": {"name": name, "arguments": {name: name, "b": [name]}}}
    messages = [
        {"role": "system", "content": name},
        {"role": "user", "content": [{"type": "text", "text": name}]},
        {"role": "assistant", "content": name, "reasoning_content": name, "tool_calls": [call]},
        {"role": "tool", "content": name},
    ]
    plain = json.loads(json.dumps((messages, [tool])).replace(name, "x"))
    tokens, frame = ids(messages, tools=[tool]), ids(plain[0], tools=plain[1])
    assert [t for t in tokens if t in CONTROL] == [t for t in frame if t in CONTROL]
    assert shown(tokens) == TINY.apply_chat_template(messages, tools=[tool], allow_special=True)


def test_an_assistants_text_may_hold_its_thinking():
    turn = {"role": "assistant", "content": "<think>hm</think>yes"}
    parted = {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    ask = {"role": "user", "content": "x"}
    assert ids([ask, turn]) == ids([ask, parted]) == ids([ask, turn], allow_special=True)


def test_a_message_is_continued_behind_what_was_typed():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a<|user|>b"}]
    assert shown(ids(messages, continue_final_message=True)).endswith("</think>a<|user|>b")
