"""Structured output: which tokens may come next, by a grammar over the text (llguidance) or by words that are forbidden.

A grammar is compiled once; every choice of every prompt gets a `TokenRules` of its own, which follows its output token by
token and looks ahead over drafts. While the model thinks nothing is demanded, but the turn may not end.
"""

import dataclasses
import functools
import json
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from dcpjax.errors import RequestError
from dcpjax.text import Needle, Tokenizer

# Blanks between the parts of JSON text are not needed, and a weak model writes them for ever.
_JSON_FORM = {"whitespace_flexible": False}
# Compiling takes a tenth of a second for a thousand.
_MOST_CHOICES = 10_000
# Bytes that must come next are not looked for ahead of time: of `/a+/ /a+/`, whose first part takes every a, that has no end.
_NOTHING_AHEAD = '%llguidance {"no_forcing": true}\n'


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What grammars need of a model: its tokenizer, ids in its logits, and the ids that end a turn."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]

    @functools.cached_property
    def inner(self) -> llguidance.LLTokenizer:
        """Made at first use: it takes a second for 150k tokens."""
        return llguidance.LLTokenizer(self.tokenizer.to_json(), n_vocab=self.size, eos_token=list(self.eos_ids))


class Grammars:
    """Compiles grammars. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._lock = threading.Lock()

    def json_schema(self, schema: Any, param: str) -> "Grammar":
        """JSON text of a schema (an object, or its JSON text). Raises `RequestError` that names `param`."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError:
                raise RequestError(f"{param}: the schema is not valid JSON") from None
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise RequestError(f"{param}: the schema must be a JSON object, got {schema!r:.200}")
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_FORM)
        except ValueError as error:
            raise RequestError(f"{param}: {str(error)[:300]}") from None
        return self._checked(source, param)

    def regex(self, pattern: str, param: str) -> "Grammar":
        """The whole text matches `pattern`. Raises `RequestError` that names `param`."""
        return self._checked(llguidance.LLMatcher.grammar_from_regex(pattern), param)

    def choice(self, choices: Sequence[str], param: str) -> "Grammar":
        """One of these texts. Raises `RequestError` that names `param`."""
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise RequestError(f"{param}: give a list of strings, none of them empty")
        if len(choices) > _MOST_CHOICES:
            raise RequestError(f"{param}: {len(choices):,} choices, at most {_MOST_CHOICES:,} are allowed")
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return self._checked(llguidance.LLMatcher.grammar_from_lark("start: " + texts), param)

    def lark(self, source: str, param: str) -> "Grammar":
        """A Lark grammar, whose first rule is `start`; tokens are named by id, as `<[1234]>`. Raises `RequestError`."""
        return self._checked(llguidance.LLMatcher.grammar_from_lark(_NOTHING_AHEAD + source), param)

    def _checked(self, source: str, param: str) -> "Grammar":
        with self._lock:  # of those that come first, one makes the tokenizer
            inner = self._vocabulary.inner
        words = llguidance.LLMatcher.validate_grammar(source, inner)
        if words and not words.startswith("WARNING"):
            raise _refused(words, param)
        matcher = llguidance.LLMatcher(inner, source, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param)
        return Grammar(matcher, self._vocabulary)


def _refused(words: str, param: str) -> RequestError:
    if words.startswith("panic"):  # for the library's authors; what it does at its limits
        return RequestError(f"{param}: the grammar is too large or too deep")
    return RequestError(f"{param}: {' '.join(words.split())[:300]}")


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled grammar at its beginning."""

    matcher: llguidance.LLMatcher
    vocabulary: Vocabulary

    def rules(self, thinking_ends: str | None = None) -> "GrammarRules":
        """For one choice. thinking_ends: the text after which the grammar begins; None: it begins at once."""
        return GrammarRules(self.matcher.deep_copy(), self.vocabulary, thinking_ends)


class GrammarRules:
    """Follows one output: a `dcpjax.host.request.Grammar`, whose `accept` and `masks` say what they do."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, thinking_ends: str | None):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._thinking = None if thinking_ends is None else Needle(thinking_ends)
        self._ended = False

    def accept(self, token_id: int) -> None:
        if self._thinking is not None:
            if self._thinking.scan(self._letters(token_id)) is not None:
                self._thinking = None
        elif token_id in self._vocabulary.eos_ids or not self._matcher.consume_token(token_id):
            self._ended = True

    def masks(self, drafts: Sequence[int], allowed: np.ndarray) -> None:
        """Narrows `allowed [k + 1, words]` uint32."""
        thinking = None if self._thinking is None else self._thinking.copy()
        taken = 0
        for row, draft in zip(allowed, [*drafts, None], strict=False):
            if self._ended:
                break
            self._mask(row, thinking is not None)
            if draft is None or draft in self._vocabulary.eos_ids:
                break
            if thinking is not None:
                if thinking.scan(self._letters(draft)) is not None:
                    thinking = None
            elif self._matcher.try_consume_tokens([draft]) == 1:
                taken += 1
            else:
                break
        if taken:
            self._matcher.rollback(taken)

    def _mask(self, row: np.ndarray, thinking: bool) -> None:
        ends = self._vocabulary.eos_ids
        if thinking:
            for token in ends:
                row[token // 32] &= ~np.uint32(1 << token % 32)
            return
        words = -(-self._vocabulary.size // 32)
        mask = np.zeros(words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if not mask.any():  # nothing is allowed any more: then the end is
            for token in ends:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        row[:words] &= mask.view(np.uint32)

    def _letters(self, token_id: int) -> str:
        return self._vocabulary.tokenizer.token_bytes(token_id).decode("latin-1")


class BadWords:
    """Forbids the last token of every word whose other tokens were just written. words: token ids. A
    `dcpjax.host.request.Grammar` (`accept`, `masks`)."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self._words = [tuple(word) for word in words]
        self._most = max(len(word) for word in self._words) - 1
        self._tail: tuple[int, ...] = ()

    def accept(self, token_id: int) -> None:
        self._tail = (*self._tail, token_id)[-self._most :] if self._most else ()

    def masks(self, drafts: Sequence[int], allowed: np.ndarray) -> None:
        """Narrows `allowed [k + 1, words]` uint32."""
        for j, row in enumerate(allowed[: len(drafts) + 1]):
            before = (*self._tail, *drafts[:j])
            for word in self._words:
                begun = word[:-1]
                if not begun or before[-len(begun) :] == begun:
                    row[word[-1] // 32] &= ~np.uint32(1 << word[-1] % 32)


class AllOf:
    """What all of several rules allow; where that is nothing, later ones give way. A `dcpjax.host.request.Grammar`
    (`accept`, `masks`)."""

    def __init__(self, *rules: GrammarRules | BadWords):
        self._rules = rules

    def accept(self, token_id: int) -> None:
        for rules in self._rules:
            rules.accept(token_id)

    def masks(self, drafts: Sequence[int], allowed: np.ndarray) -> None:
        """Narrows `allowed [k + 1, words]` uint32."""
        for rules in self._rules:
            before = allowed.copy()
            rules.masks(drafts, allowed)
            nothing = ~allowed.any(axis=1)
            allowed[nothing] = before[nothing]
