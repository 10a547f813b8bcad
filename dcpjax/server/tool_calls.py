"""Parser `glm47`: finds tool calls in GLM's form while the text arrives, in time that depends on the new text only.

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>

Blanks may stand around names and keys and between tags. What is between calls is content; content that is blank while there
are calls is none. The pieces joined never depend on how the text was cut. A text that ends inside a call keeps the whole
arguments it has, and a string as far as it got; inside a name it has no call. A call without a name is content.
"""

import dataclasses
import re
import uuid

from dcpjax.server.argument_values import ToolSchemas, quoted, written

CALL, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


@dataclasses.dataclass(slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclasses.dataclass(slots=True)
class CallBegin:
    """Call number `index` (from 0) begins; its name is known."""

    index: int
    name: str


@dataclasses.dataclass(slots=True)
class CallPart:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    arguments: str


Part = Content | CallBegin | CallPart


def call_id(prefix: str = "call_") -> str:
    """A new id for a call: `prefix` and 24 hexadecimal digits."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


class _Tags:
    """What ends a state: the first of `tags`. Each begins with "<" and has no other one, so only a last "<" can be the
    start of one that is not complete."""

    def __init__(self, *tags: str):
        self._tags = tags
        self._any = re.compile("|".join(map(re.escape, tags)))

    def split(self, text: str) -> tuple[str, str | None, str]:
        """(text before the first tag, the tag, what follows), or (text that is surely before one, None, the rest)."""
        at = text.rfind("<")
        if at < 0:
            return text, None, ""
        found = self._any.search(text)
        if found is not None:
            return text[: found.start()], found[0], text[found.end() :]
        if not any(tag.startswith(text[at:]) for tag in self._tags):
            at = len(text)
        return text[:at], None, text[at:]


_CONTENT = _Tags(CALL)
_NAME = _Tags(KEY, END, CALL)
_BETWEEN = _NAME
_IN_KEY = _Tags(KEY_END, VALUE, END)
_TO_VALUE = _Tags(VALUE, KEY, END)
_IN_VALUE = _Tags(VALUE_END)


class ToolCalls:
    """`push` and `finish` return the next parts. most: calls after so many are dropped; None: none are."""

    def __init__(self, schemas: ToolSchemas, most: int | None = None):
        self._schemas = schemas
        self._most = most
        self._state = ToolCalls._content  # not bound: it would keep this object alive until the collector looks
        self._tags = _CONTENT
        self._held = ""  # may be the start of a tag
        self._pieces: list[str] = []  # of a name, a key or a value that is sent when it is complete
        self._blank: list[str] = []  # content that is none if there are calls and nothing else is said
        self._spoke = False  # content that is not blank was sent
        self._parts: list[Part] = []
        self._index = -1  # of the call that is being read
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._kinds: frozenset[str] | None = None
        self._open = False  # whether the call's braces are
        self._string = False  # a string is being sent as it comes

    @property
    def num_calls(self) -> int:
        """Calls whose name is known, those that are dropped not counted."""
        calls = self._index + 1
        return calls if self._most is None else min(calls, self._most)

    def push(self, text: str) -> list[Part]:
        """More text came."""
        text = self._held + text
        while True:
            before, tag, text = self._tags.split(text)
            self._state(self, before, tag)
            if tag is None:
                self._held = text
                break
        return self._take()

    def finish(self) -> list[Part]:
        """No more will come: what was held back, and the end of a call that was cut."""
        held, self._held = self._held, ""
        if self._state is ToolCalls._content:
            self._content(held, None)
        elif self._open:
            self._close(cut=True)
        if self._index < 0 and self._blank:
            self._parts.append(Content("".join(self._blank)))
            self._blank = []
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _to(self, state, tags: _Tags) -> None:
        self._state, self._tags, self._pieces = state, tags, []

    # Each state takes text, and the tag that ends it if it has come.

    def _content(self, text: str, tag: str | None) -> None:
        if text and not self._spoke and not text.strip():
            self._blank.append(text)
        elif text:
            self._parts.append(Content("".join(self._blank) + text))
            self._spoke, self._blank = True, []
        if tag is not None:
            self._to(ToolCalls._in_name, _NAME)

    def _in_name(self, text: str, tag: str | None) -> None:
        self._pieces.append(text)
        if tag is None:
            return
        raw = "".join(self._pieces)
        if not raw.strip():
            self._to(ToolCalls._content, _CONTENT)
            self._content(CALL + raw + (tag if tag != CALL else ""), None)
            if tag == CALL:
                self._to(ToolCalls._in_name, _NAME)
            return
        self._begin(raw.strip())
        self._between("", tag)

    def _between(self, text: str, tag: str | None) -> None:
        # Nothing belongs here but blanks; what else a model writes is nobody's.
        if tag == KEY:
            self._to(ToolCalls._in_key, _IN_KEY)
        elif tag is not None:
            self._close()
            self._to(*((ToolCalls._in_name, _NAME) if tag == CALL else (ToolCalls._content, _CONTENT)))

    def _in_key(self, text: str, tag: str | None) -> None:
        self._pieces.append(text)
        if tag is None:
            return
        self._key = "".join(self._pieces).strip()
        if tag == KEY_END:
            self._to(ToolCalls._to_value, _TO_VALUE)
        else:
            self._to_value("", tag)

    def _to_value(self, text: str, tag: str | None) -> None:
        if tag == VALUE:
            self._kinds = self._schemas.kinds(self._name, self._key)
            self._to(ToolCalls._in_value, _IN_VALUE)
            if self._kinds == {"string"}:
                self._send(self._before_value() + '"')
                self._string = True
        elif tag is not None:  # a key without a value
            self._to(ToolCalls._between, _BETWEEN)
            self._between("", tag)

    def _in_value(self, text: str, tag: str | None) -> None:
        if self._string:
            if text:
                self._send(quoted(text)[1:-1])
        else:
            self._pieces.append(text)
        if tag is None:
            return
        if self._string:
            self._send('"')
        else:
            self._send(self._before_value() + written("".join(self._pieces), self._kinds))
        self._string = False
        self._to(ToolCalls._between, _BETWEEN)

    def _begin(self, name: str) -> None:
        self._index += 1
        self._name, self._num_arguments, self._open = name, 0, True
        if not self._dropped:
            self._parts.append(CallBegin(self._index, name))
        self._to(ToolCalls._between, _BETWEEN)

    def _before_value(self) -> str:
        self._num_arguments += 1
        return f"{'{' if self._num_arguments == 1 else ', '}{quoted(self._key)}: "

    def _close(self, cut: bool = False) -> None:
        end = '"' if cut and self._string else ""
        self._send(end + ("}" if self._num_arguments else "{}"))
        self._open = self._string = False

    @property
    def _dropped(self) -> bool:
        return self._most is not None and self._index >= self._most

    def _send(self, arguments: str) -> None:
        if not self._dropped:
            self._parts.append(CallPart(self._index, arguments))
