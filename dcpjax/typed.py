"""Control tokens that somebody typed into a message stay text; those that the chat template writes are real.

The names of tokens in messages are broken by a mark before the template is rendered, and the marks are taken out again when
the prompt becomes ids: what stood broken is encoded letter by letter. Whoever writes `<|assistant|>` in a message gets the
twelve-odd tokens of that text, not a new turn.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# A code point that Unicode promises never to assign. One in a message is doubled, so that none is ambiguous.
MARK = "\ufdd0"

# Parts of a message that the template shows.
_SHOWN = ("content", "reasoning_content", "tool_calls", "name", "tool_call_id")


class TypedTokens:
    """Marks token names in messages, and encodes what holds marks. names: of the tokens that are found in text."""

    def __init__(self, names: Iterable[str]):
        ordered = sorted(names, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        # The mark is a name's neighbour too: doubling it never completes one.
        self._typed = re.compile("|".join(map(re.escape, [*ordered, MARK])))

    def mark(self, value: Any) -> Any:
        """`value` with every name in its texts broken, at any depth; keys of objects too."""
        if isinstance(value, str):
            return self._typed.sub(_broken, value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def mark_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their texts marked; roles and types stay as they are."""
        marked = []
        for message in map(_parted, messages):
            shown = {key: self._shown(key, message[key]) for key in _SHOWN if key in message}
            marked.append({**message, **shown})
        return marked

    def _shown(self, key: str, value: Any) -> Any:
        if key == "content" and isinstance(value, list):  # parts
            return [{**part, "text": self.mark(part["text"])} if "text" in part else part for part in value]
        return self.mark(value)

    def encode(
        self, text: str, token_id: Callable[[str], int | None], encode: Callable[[list[str]], list[list[int]]]
    ) -> list[int]:
        """Ids of a rendered prompt with marks. token_id: of a name. encode: texts → ids, whatever they look like."""
        stretches, names, at = [], [], 0
        for match in self._names.finditer(text):
            stretches.append(unmarked(text[at : match.start()]))
            names.append(token_id(match[0]))
            at = match.end()
        stretches.append(unmarked(text[at:]))
        ids: list[int] = []
        for plain, name in zip(encode(stretches), [*names, None], strict=True):
            ids += plain
            if name is not None:
                ids.append(name)
        return ids


def _parted(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's text that came with its thinking, in two parts: the template looks for a tag that will be broken."""
    content = message.get("content")
    if message.get("role") != "assistant" or message.get("reasoning_content") or not isinstance(content, str):
        return message
    thinking, close, rest = content.partition("</think>")
    if not close:
        return message
    return {**message, "reasoning_content": thinking.rpartition("<think>")[2], "content": rest}


def unmarked(text: str) -> str:
    """The text as it was typed."""
    return re.sub(f"{MARK}({MARK}?)", r"\1", text)


def _broken(match: re.Match[str]) -> str:
    name = match[0]
    return MARK * 2 if name == MARK else f"{name[0]}{MARK}{name[1:]}"
