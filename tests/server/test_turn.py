"""Tokens of the thinking are counted alike, however they arrive."""

import pytest

from dcpjax.server.argument_values import ToolSchemas
from dcpjax.server.echo import TINY
from dcpjax.server.ticket import Prediction, Update
from dcpjax.server.tool_calls import ToolCalls
from dcpjax.server.turn import Turn, TurnRules
from dcpjax.text import Tokenizer

TOKENIZER = Tokenizer.load(TINY)


def update(ids: list[int], finish: str | None = None) -> Update:
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    return Update(0, text, ids, [], 0, Prediction(), finish)


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("one two</think>three four", "one two</think>"),
        ("one two<tool_call>f</tool_call>", "one two"),
        ("one two three", "one two three"),
        ("<tool_call>f</tool_call>", ""),
        ("</think>x<tool_call>f</tool_call>", "</think>"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_of_the_thinking(text, thinking, size):
    turn = Turn(TurnRules(thinking=True), ToolCalls(ToolSchemas([])), TOKENIZER)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    for i, piece in enumerate(pieces):
        turn.take(update(piece, "stop" if i == len(pieces) - 1 else None))
    assert turn.num_tokens == len(ids)
    assert turn.num_reasoning == len(TOKENIZER.encode(thinking, add_special_tokens=False))
