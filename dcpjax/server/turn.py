"""One choice of a chat answer while it grows: thinking, content and tool calls, parted as they arrive."""

import dataclasses

from dcpjax.server.reasoning import CALL, CLOSE, Reasoning
from dcpjax.server.ticket import Prediction, Update
from dcpjax.server.tool_calls import CallPart, Content, Part, ToolCalls
from dcpjax.text import Tokenizer


@dataclasses.dataclass(slots=True)
class Thought:
    """A piece of the thinking."""

    text: str


@dataclasses.dataclass(frozen=True)
class TurnRules:
    """thinking: whether the prompt ends inside a think block. separate: whether thinking is told from content. shown:
    whether it is in the answer."""

    thinking: bool
    separate: bool = True
    shown: bool = True


class Turn:
    """Takes updates, gives parts. calls: None leaves tool calls in the content."""

    def __init__(self, rules: TurnRules, calls: ToolCalls | None, tokenizer: Tokenizer):
        self.num_tokens = 0
        self.num_reasoning = 0
        self.cached_tokens = 0
        self.prediction = Prediction()
        self._shown = rules.shown
        self._split = Reasoning(rules.thinking and rules.separate)
        self._calls = calls
        # What ends the thinking, where it is one token, and how many of its tokens are thinking.
        self._ends = ((tokenizer.token_id(CLOSE), 1), (tokenizer.token_id(CALL), 0))
        self._counting = rules.thinking  # tokens of the thinking
        self._reason: str | None = None
        self._stopped_by: int | str | None = None

    def take(self, update: Update) -> list[Thought | Part]:
        """What the update says; texts of one kind in a row are one part, and none is empty."""
        self._count(update)
        reasoning, content = self._split.push(update.text)
        parts = self._parse(reasoning, content)
        if update.finish_reason is not None:
            self._reason, self._stopped_by = update.finish_reason, update.stop_reason
            parts += self._parse(*self._split.finish())
            if self._calls is not None:
                parts += self._calls.finish()
        if not self._split.thinking:
            self._counting = False  # perhaps by a tag that was no single token
        return parts if len(parts) < 2 else _joined(parts)

    @property
    def silent(self) -> bool:
        """Whether all of the text is thinking."""
        return self._split.thinking

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def finish_reason(self) -> str | None:
        """ "tool_calls" if the model made calls and then ended its turn."""
        if self._reason == "stop" and self._stopped_by is None and self.num_calls:
            return "tool_calls"
        return self._reason

    def _count(self, update: Update) -> None:
        ids = update.token_ids
        self.num_tokens += len(ids)
        self.cached_tokens, self.prediction = update.cached_tokens, update.prediction
        if self._counting:
            ends = [ids.index(token) + more for token, more in self._ends if token in ids]
            self._counting = not ends
            self.num_reasoning += min(ends, default=len(ids))

    def _parse(self, reasoning: str, content: str) -> list[Thought | Part]:
        parts: list[Thought | Part] = [Thought(reasoning)] if reasoning and self._shown else []
        if content:
            parts += [Content(content)] if self._calls is None else self._calls.push(content)
        return parts


def _joined(parts: list[Thought | Part]) -> list[Thought | Part]:
    joined: list[Thought | Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case (Thought(a), Thought(b)):
                joined[-1] = Thought(a + b)
            case (Content(a), Content(b)):
                joined[-1] = Content(a + b)
            case (CallPart(i, a), CallPart(j, b)) if i == j:
                joined[-1] = CallPart(i, a + b)
            case _:
                joined.append(part)
    return joined
