"""What a user asks for, and one request's life on the host.

`SamplingParams` is the wish, frozen and checked. `Request` is the plain mutable record that scheduler and engine share;
`n` choices of one prompt are `n` requests.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from dcpjax.errors import RequestError
from dcpjax.host.keys import PageKeys

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "abort"]

_INT64 = range(-(2**63), 2**63)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one prompt. Raises `RequestError`, which names the field, if a value is out of range.

    temperature: ≥ 0; below 1e-5 is greedy.
    top_k: candidates kept; 0 or −1 keeps all.
    top_p, min_p: in (0, 1] and [0, 1].
    max_tokens: tokens to generate, ≥ 1; None: the rest of the context.
    min_tokens: no end-of-text, stop id or stop string before this many tokens.
    stop: a string or up to 16, none empty; kept as a tuple.
    stop_token_ids: ids that end the text, beside the model's own.
    seed: any int64; None: the engine draws one.
    n: choices for the prompt, 1…64, each a request of its own.
    presence_penalty, frequency_penalty: in [−2, 2], over generated tokens.
    repetition_penalty: 1.2e-38 … 3.4e38 (what float32 can divide by), over prompt and generated tokens.
    logit_bias: token id → −100…100.
    allowed_token_ids: no other ones are generated, ends of text included; None: all may be.
    logprobs: how many of the best to report per token; 0: only the chosen one; −1: the whole vocabulary; None: nothing.
    prompt_logprobs: the same of the prompt's tokens; such a prompt takes nothing over from the prefix cache.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self):
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bytes | Mapping) or not isinstance(value, Iterable)):
                raise RequestError(f"{name}: got {value!r:.200}, it must be a list")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias: got {self.logit_bias!r:.200}, it must map token ids to numbers")
        # Set once, while the object is made: readers then meet one form only.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

        _number("temperature", self.temperature, lambda x: x >= 0, "at least 0")
        _integer("top_k", self.top_k, lambda x: x >= -1, "0 or -1 (off), or at least 1")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
        _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, lambda x: x >= 1, "at least 1")
        _integer("min_tokens", self.min_tokens, lambda x: x >= 0, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens: got {self.min_tokens}, more than max_tokens = {self.max_tokens}")
        if len(self.stop) > 16:
            raise RequestError(f"stop: got {len(self.stop)} strings, at most 16 are allowed")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop: got {stop!r:.200}, each must be a string that is not empty")
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids: got an empty list, at least 1 id is needed")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, lambda x: x >= 0, "token ids, at least 0")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, lambda x: x >= 0, "token ids, at least 0")
        if self.seed is not None:
            _integer("seed", self.seed, lambda x: int(x) in _INT64, "a 64-bit integer")
        _integer("n", self.n, lambda x: 1 <= x <= 64, "between 1 and 64")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), lambda x: -2 <= x <= 2, "between -2 and 2")
        _number("repetition_penalty", self.repetition_penalty, _normal, "between 1.2e-38 and 3.4e38")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, lambda x: x >= 0, "a map whose keys are token ids, at least 0")
            _number("logit_bias", bias, lambda x: -100 <= x <= 100, "a map whose values are between -100 and 100")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is None:
                continue
            _integer(name, getattr(self, name), lambda x: x >= -1, "at least 0, or -1 (the whole vocabulary)")

    def __getstate__(self) -> dict[str, object]:
        """What is not as it is by default: it crosses between processes with every request."""
        return {name: value for name, value in vars(self).items() if value is not _DEFAULTS[name]}

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: no noise is drawn."""
        return self.temperature < 1e-5


# Of a class: an object that lacks a field has it by default.
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


# The plain types first: to ask the abstract ones takes longer than all the rest of a check.
def _number(name, value, allowed, words):
    if type(value) is float and math.isfinite(value) and allowed(value):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or not allowed(value):
        raise RequestError(f"{name}: got {value!r:.200}, it must be {words}")


def _normal(value: float) -> bool:
    """Whether it is above 0 and not more or less than float32 has: devices make 0 of smaller ones."""
    return 1.2e-38 <= value <= 3.4e38


def _integer(name, value, allowed, words):
    if type(value) is int and allowed(value):
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not allowed(value):
        raise RequestError(f"{name}: got {value!r:.200}, it must be {words} (an integer)")


class Text(Protocol):
    """What the engine needs of a request's text: it only looks for stop strings."""

    stop_hit: str | None

    def push(self, token_id: int) -> str:
        """The output has grown by this token; what of the text may be shown now."""

    def finish(self) -> str:
        """The output has ended; the rest of the text."""


class Grammar(Protocol):
    """Says which tokens may come next in one request's output."""

    def accept(self, token_id: int) -> None:
        """The output has grown by this token."""
        ...

    def masks(self, drafts: Sequence[int], allowed: np.ndarray) -> None:
        """Takes away from `allowed [k + 1, ceil(V / 32)]` uint32, bit i of word w for token 32·w + i, row j, what may not
        follow the output and drafts 0 … j − 1. Rows behind a draft that is not allowed are never looked at."""
        ...


class TokenLogprobs(NamedTuple):
    """Of one token: its natural logprob and rank (1: most likely), and the n best: ids `[n]` int32 with their logprobs,
    values `[n]` float32."""

    chosen: float
    rank: int
    ids: np.ndarray
    values: np.ndarray


class PromptScores(Protocol):
    """Logprobs of one row's tokens, `[1, n]` float32 and int32; see `RowLogprobs`."""

    chosen: np.ndarray

    def token(self, i: int, j: int, n: int) -> TokenLogprobs:
        """Of place j in row i, the `n` best."""


@dataclasses.dataclass
class Times:
    """Moments in a request's life, in the engine clock's seconds; None: not yet."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """One choice of one prompt, from arrival to its last token.

    Token positions, while it runs (`known` = prompt + output, `limit` its most)::

        0 ........ matched ....... prefill ....... known ....... limit
        | in pages that |  chunks: tokens  |  decode rows:    |  never
        | were there    |  the host knows  |  one new token,  |  written
                                              drafts beside it

    A query starts at token `max(matched − 1, 0)`: the first row of a hit reads and is not written. `computed` is where
    the next query starts, if every draft of the steps in flight is accepted; it is corrected when a step is absorbed.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int  # prompt + output tokens at most
    seed: int  # uint32
    choice: int = 0
    text: Text | None = None
    cache_salt: str | None = None  # pages are shared between requests of equal salt only
    no_store: bool = False  # its pages are not for others
    grammar: Grammar | None = None
    drafts: tuple[int, ...] = ()  # for its next decode row, as the grammar must know them
    adapter: str | None = None  # name of the weights added to the model's
    priority: int = 0  # the smaller, the earlier
    number: int = 0  # in the order of arrival
    output: list[int] = dataclasses.field(default_factory=list)
    status: Status = "waiting"
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    matched: int = 0  # tokens whose rows were in the cache at admission
    prefill: int = 0  # tokens known at admission: chunks end here, decode rows begin
    computed: int = 0
    inflight: int = 0  # steps dispatched and not absorbed
    promised: int = 0  # those of them that bring a token: one at least each
    cached_tokens: int | None = None  # for reports: prompt tokens taken over at the first admission; None before it
    drafted: int = 0  # drafts made for its next decode row
    verified_drafts: int = 0
    accepted_drafts: int = 0  # those of them that are in the output
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)  # of its second token and on
    metrics: Times = dataclasses.field(default_factory=Times)
    keys: PageKeys | None = None  # of its whole pages; None until they are asked for
    published: int = 0  # its first pages that others can hit
    outdated: bool = False  # the cache was reset since its admission: its rows are not for others
    # The pages as the plans carry them. One object until the list grows: a reader may compare by identity.
    table: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all: smaller ones run first and are pre-empted last."""
        return self.priority, self.number

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, copied."""
        return self.prompt + self.output

    @property
    def decoding(self) -> bool:
        """Whether all chunks are scheduled: from here on the next token is known on the device only."""
        return self.status == "running" and self.computed >= self.prefill

    @property
    def written(self) -> int:
        """First tokens whose rows, target's and draft's, are final once the steps planned so far have run.

        Those of the chunks; then all but the last known token: the step that reads a token writes its row.
        """
        # Without the property: this is asked several times for each token of each request.
        return min(self.computed, max(self.prefill, len(self.prompt) + len(self.output) - 1))

    @property
    def complete(self) -> bool:
        """Whether the steps in flight are sure to bring the last possible token."""
        return len(self.prompt) + len(self.output) + self.promised >= self.limit

    def known(self, start: int, stop: int) -> tuple[int, ...]:
        """The known tokens at positions `start … stop − 1`."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return tuple(self.prompt[start:stop])
        return (*self.prompt[start:], *self.output[max(start - num_prompt, 0) : stop - num_prompt])

    def score_prompt(self, start: int, scores: "PromptScores") -> None:
        """Takes the scores of prompt tokens `start + 1` and on; once more after a pre-emption."""
        del self.prompt_logprobs[start:]
        count = min(scores.chosen.shape[1], len(self.prompt) - 1 - start)
        self.prompt_logprobs += [scores.token(0, j, self.params.prompt_logprobs) for j in range(count)]

    def hold(self, pages: Sequence[int]) -> None:
        """Adds pages at the end."""
        self.pages.extend(pages)
        self.table = tuple(self.pages)

    def drop_pages(self) -> list[int]:
        """Takes all pages away and returns them."""
        pages, self.pages, self.table = self.pages, [], ()
        return pages

    def check(self, num_drafts: int) -> None:
        """Asserts the order of the positions above."""
        known = self.num_tokens
        assert 0 <= self.promised <= self.inflight, self.id
        assert len(self.prompt) < self.limit and known <= self.limit, self.id
        if self.status != "running":
            assert self.row is None and not self.pages and self.computed == self.published == 0, self.id
            return
        assert max(self.matched - 1, 0) <= self.computed and self.matched <= self.prefill <= known, self.id
        assert self.published <= len(self.pages), self.id
        if self.decoding:
            assumed = self.computed - (known - 1 + self.promised)  # drafts of the steps in flight
            assert 0 <= assumed <= self.promised * num_drafts, self.id
