"""What a body demands of the form of its answer, as rules for the engine: schemas, patterns, choices, forced tool calls."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dcpjax.errors import RequestError
from dcpjax.grammar import AllOf, BadWords, Grammar, Grammars
from dcpjax.host import request as host
from dcpjax.server.errors import ApiError
from dcpjax.server.protocol import ChatBody, SamplingBody
from dcpjax.server.reasoning import CLOSE
from dcpjax.server.service import Served
from dcpjax.server.tool_grammar import tool_grammar

Rules = Callable[[], host.Grammar | None]
"""Makes the rules of one choice."""

_Wish = tuple[str, str, Any]
"""The field that says it, what kind of form, and the form."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OLD = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


async def rules_of(body: SamplingBody, served: Served, thinking: bool) -> Rules:
    """What makes the rules of a choice. thinking: whether the answer begins inside a think block, to which no grammar applies.

    Raises `ApiError` or `RequestError` for forms that contradict each other or cannot be compiled.
    """
    wishes = [wish for wish in (_format(body), *_structured(body), *_forced(body)) if wish is not None]
    if not wishes and not body.bad_words:
        return lambda: None
    # Large schemas take their time.
    return await asyncio.to_thread(_rules, wishes, body, served, thinking)


def _rules(wishes: list[_Wish], body: SamplingBody, served: Served, thinking: bool) -> Rules:
    grammar = _grammar(wishes, served)
    words = _bad_words(body, served)
    if grammar is not None:
        for field in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if getattr(body, field):
                raise ApiError(400, f"{field}: not possible together with a grammar; leave one of them out", field)

    def make() -> host.Grammar | None:
        parts: list[Any] = [] if grammar is None else [grammar.rules(CLOSE if thinking else None)]
        parts += [BadWords(words)] if words else []
        if not parts:
            return None
        return _Timed(AllOf(*parts) if len(parts) > 1 else parts[0], served.metrics.masked)

    return make


class _Timed:
    """A grammar; `tell` hears how many seconds its masks took."""

    def __init__(self, inner: host.Grammar, tell: Callable[[float], None]):
        self.accept = inner.accept
        self._inner = inner
        self._tell = tell

    def masks(self, drafts: Sequence[int], allowed: np.ndarray) -> None:
        start = time.perf_counter()
        self._inner.masks(drafts, allowed)
        self._tell(time.perf_counter() - start)


def _grammar(wishes: list[_Wish], served: Served) -> Grammar | None:
    if not wishes:
        return None
    if len(wishes) > 1:
        names = " and ".join(dict.fromkeys(field for field, _, _ in wishes))
        raise ApiError(400, f"{wishes[1][0]}: only one form can be demanded, got {names}", wishes[1][0])
    field, kind, value = wishes[0]
    served.tokenizer(field)
    return _compile(served.grammars, field, kind, value, served)


def _compile(grammars: Grammars, field: str, kind: str, value: Any, served: Served) -> Grammar:
    match kind:
        case "json":
            return grammars.json_schema(value, field)
        case "json_object":
            return grammars.json_schema({"type": "object"}, field)
        case "choice":
            return grammars.choice(value if isinstance(value, list) else [], field)
        case "tools":
            tools, many = value
            return grammars.lark(tool_grammar(tools, served.tokenizer(field), many), field)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{field}: {kind} must be a string that is not empty", field)
    return grammars.regex(value, field) if kind == "regex" else grammars.lark(_lark(value, field), field)


def _format(body: SamplingBody) -> _Wish | None:
    given = body.response_format or {"type": "text"}
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "response_format", kind, None
    if kind != "json_schema":
        raise ApiError(
            400,
            f"response_format: type {kind!r:.200} is not supported; use text, json_object or json_schema",
            "response_format",
        )
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise ApiError(400, "response_format: json_schema needs {'schema': …}", "response_format")
    return "response_format", "json", inner["schema"]


def _structured(body: SamplingBody) -> list[_Wish]:
    wishes = []
    given = {key: value for key, value in (body.structured_outputs or {}).items() if value is not None}
    for kind, value in given.items():
        if kind not in _KINDS:
            raise ApiError(
                400, f"structured_outputs: {kind[:100]!r} is not one of {', '.join(_KINDS)}", "structured_outputs"
            )
        wishes.append(("structured_outputs", kind, value))
    if body.structured_outputs is not None and not given:
        raise ApiError(400, f"structured_outputs: give one of {', '.join(_KINDS)}", "structured_outputs")
    for field in _OLD:
        if getattr(body, field) is not None:
            wishes.append((field, field.removeprefix("guided_"), getattr(body, field)))
    return wishes


def _forced(body: SamplingBody) -> list[_Wish]:
    """Tool calls that must be made."""
    if not isinstance(body, ChatBody) or body.tool_choice in (None, "auto", "none"):
        return []
    tools = body.tools
    if isinstance(body.tool_choice, dict):
        name = body.tool_choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    many = body.parallel_tool_calls is not False and body.tool_choice == "required"
    return [("tool_choice", "tools", (tools, many))]


def _lark(text: str, field: str) -> str:
    """Grammars in the other notation, `root ::= …`, are translated."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it is not said what it may raise
        raise RequestError(f"{field}: {str(error)[:300]}") from None


def _bad_words(body: SamplingBody, served: Served) -> list[list[int]]:
    """Ids of every word, also as they are behind a blank."""
    if not body.bad_words:
        return []
    tokenizer = served.tokenizer("bad_words")
    if not all(body.bad_words):
        raise ApiError(400, "bad_words: an empty word forbids everything", "bad_words")
    texts = [form for word in body.bad_words for form in (word, " " + word.lstrip())]
    return [ids for text in dict.fromkeys(texts) if (ids := tokenizer.encode(text, add_special_tokens=False))]
