"""The split of thinking and content, cut anywhere, equals the split of the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcpjax.server.reasoning import CALL, CLOSE, OPEN, Reasoning, thinking_open

PIECE = st.one_of(
    st.sampled_from([OPEN, CLOSE, CALL, "<", "</", "</think", "<tool", "<think", "think>", "_call>", "\n", "é", "x"]),
    st.text(alphabet="<>/thinkx ", max_size=5),
)


def split(text: str, thinking: bool) -> tuple[str, str]:
    """Oracle, on the whole text."""
    if not thinking:
        return "", text
    text = text.removeprefix(OPEN)
    ends = [at for at in (text.find(CLOSE), text.find(CALL)) if at >= 0]
    if not ends:
        return text, ""
    at = min(ends)
    return text[:at], text[at:].removeprefix(CLOSE)


@settings(max_examples=400)
@given(st.lists(PIECE, max_size=12), st.booleans())
@example(["<thi", "nk>", "a</thi", "nk", ">b</think>c"], True)
@example(["<think", ">", "</think><tool_call>"], True)
@example(["<think"], True)
def test_pieces_equal_the_whole(pieces, thinking):
    parser, reasoning, content = Reasoning(thinking), "", ""
    for piece in pieces:
        more = parser.push(piece)
        assert not (more[0] and content), "reasoning after content"
        reasoning, content = reasoning + more[0], content + more[1]
    late = parser.finish()
    assert (reasoning + late[0], content + late[1]) == split("".join(pieces), thinking)
    assert parser.finish() == ("", "")


@given(st.text(alphabet="</thinkx", max_size=12))
def test_only_what_could_become_a_tag_is_held_back(text):
    parser = Reasoning(True)
    parser.push("x")
    shown = "".join("".join(parser.push(char)) for char in text)
    if CLOSE in text:
        return
    held = text.removeprefix(shown) if text.startswith(shown) else None
    assert held is not None and (not held or CLOSE.startswith(held) or CALL.startswith(held))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<sop><|user|>Hi<|assistant|><think>", True),
        ("<sop><|user|>Hi<|assistant|><think></think>", False),
        ("<sop><|user|>Hi<|assistant|>", False),
        ("<sop><|user|>what is <think>", False),
        ("<|user|>what is <think><|assistant|>", False),
        ("<|user|>what is </think><|assistant|><think>", True),
        ("<|assistant|><think>half a thought", True),
        ("<|assistant|><think>thought</think>half an answer", False),
        ("<|assistant|><think></think>x<|observation|><tool_response>1</tool_response>", False),
        ("plain text <think>", False),
    ],
)
def test_the_first_state_is_that_of_the_rendered_prompt(prompt, expected):
    assert thinking_open(prompt) is expected
