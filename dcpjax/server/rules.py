"""The form that an answer must have, on its way from the front to the engine process, which compiles it."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from dcpjax.errors import RequestError
from dcpjax.grammar import AllOf, BadWords, Grammar, Grammars
from dcpjax.host import request as host
from dcpjax.server.errors import ApiError
from dcpjax.server.tool_grammar import tool_grammar
from dcpjax.text import Tokenizer

# Compiled forms that are kept: those of a request between its check and its start, and of clients that repeat theirs.
_MOST_FORMS = 32


@dataclasses.dataclass(frozen=True)
class Form:
    """field: of the body, which errors name. kind: "json", "json_object", "regex", "choice", "grammar" or "tools".
    value: JSON."""

    field: str
    kind: str
    value: Any


@dataclasses.dataclass(frozen=True)
class RulesWish:
    """What one choice's answer must look like. begins_after: the text after which the form applies, None: at once.
    bad_words: ids of what must not be said."""

    form: Form | None
    begins_after: str | None
    bad_words: list[list[int]]


class RulesMaker:
    """Compiles forms, and makes rules of wishes. tell: hears how many seconds each row of masks took.

    Safe to use from several threads.
    """

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer | None, tell: Callable[[float], None]):
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._tell = tell
        self._compiled = functools.lru_cache(_MOST_FORMS)(self._compile)

    def check(self, form: Form) -> None:
        """Compiles `form`. Raises `ApiError` or `RequestError` if that cannot be done."""
        self._grammar(form)

    def make(self, wishes: Sequence[RulesWish | None]) -> list[host.Grammar | None]:
        """The rules of each choice, None where nothing is wished. Choices of a request share their wish."""
        grammars: dict[int, Grammar] = {}
        for wish in wishes:
            if wish is not None and wish.form is not None and id(wish) not in grammars:
                grammars[id(wish)] = self._grammar(wish.form)
        return [None if wish is None else self._rules(wish, grammars.get(id(wish))) for wish in wishes]

    def _rules(self, wish: RulesWish, grammar: Grammar | None) -> host.Grammar:
        parts: list[Any] = [] if grammar is None else [grammar.rules(wish.begins_after)]
        parts += [BadWords(wish.bad_words)] if wish.bad_words else []
        return _Timed(AllOf(*parts) if len(parts) > 1 else parts[0], self._tell)

    def _grammar(self, form: Form) -> Grammar:
        try:
            text = orjson.dumps(form.value)
        except TypeError:  # so says the encoder of what is deeper than it goes
            raise RequestError(f"{form.field}: nested too deeply") from None
        return self._compiled(form.field, form.kind, text)

    def _compile(self, field: str, kind: str, text: bytes) -> Grammar:
        value, grammars = orjson.loads(text), self._grammars
        match kind:
            case "json":
                return grammars.json_schema(value, field)
            case "json_object":
                return grammars.json_schema({"type": "object"}, field)
            case "choice":
                return grammars.choice(value if isinstance(value, list) else [], field)
            case "tools":
                tools, many = value
                return grammars.lark(tool_grammar(tools, self._tokenizer, many), field)
        if not isinstance(value, str) or not value:
            raise ApiError(400, f"{field}: {kind} must be a string that is not empty", field)
        return grammars.regex(value, field) if kind == "regex" else grammars.lark(_lark(value, field), field)


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


def _lark(text: str, field: str) -> str:
    """Grammars in the other notation, `root ::= …`, are translated."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001 - it is not said what it may raise
        raise RequestError(f"{field}: {str(error)[:300]}") from None
