"""A runner without a device: memory of pages, state of rows, both changed in the order of dispatch.

The next token is a function of all tokens before it, *read back from the pages*, so a page handed to two requests, a
row reused too early or a position off by one changes the text. Slots never written hold NaN, and so does a page that was
taken anew. Target row i has slot i; draft row i, of the token after it, slot i + 1: a hit must find both.
"""

import dataclasses
import zlib

import numpy as np

from dcpjax.host.events import Cleared, Event, Removed, Stored
from dcpjax.host.plan import RowLogprobs, StepPlan, StepResult
from dcpjax.host.request import Request, SamplingParams

EOS = 0
VOCAB = 50
REJECTED = 255  # what a rejected draft or a provisional row leaves behind


def next_token(tokens: list[int], prompt_len: int, params: SamplingParams, seed: int, choice: int) -> int:
    noise = b"" if params.greedy else f"{seed},{choice}".encode()
    token = zlib.crc32(bytes(tokens) + noise) % VOCAB
    if len(tokens) < prompt_len + params.min_tokens:
        while token == EOS or token in params.stop_token_ids:
            token = (token + 1) % VOCAB
    return token


def expected(prompt: list[int], params: SamplingParams, max_model_len: int, seed: int = 0, choice: int = 0):
    """Output and finish reason of a prompt, from nothing but the prompt."""
    limit = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens, len(prompt), params, seed, choice))
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class Replay:
    """The keys that can be hit, from events alone."""

    def __init__(self):
        self.keys = set()
        self.num_cleared = 0

    def apply(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Stored():
                    assert event.keys and len(event.keys) == len(event.contents) == len({*event.keys} - self.keys)
                    assert event.parent is None or event.parent in self.keys
                    assert len(event.tokens) == len(event.keys) * event.page_tokens
                    self.keys |= set(event.keys)
                case Removed():
                    assert set(event.keys) <= self.keys
                    self.keys -= set(event.keys)
                case Cleared():
                    self.keys.clear()
                    self.num_cleared += 1


@dataclasses.dataclass
class _Row:
    request: Request
    matched: int
    limit: int
    length: int  # slots that count
    last: int = -1  # the token after them
    drafted: int = 0  # drafts made for the next step


class _Pending:
    def __init__(self, runner: "FakeRunner", plan: StepPlan, result: StepResult):
        self._runner, self._plan, self._result = runner, plan, result

    def fetch(self) -> StepResult:
        epoch, _ = self._runner.unread.pop(0)
        assert epoch == self._plan.epoch, "steps are read in the order of dispatch, once"
        return self._result


class FakeRunner:
    """`accept(length)`: how many tokens, 1 … num_drafts + 1, a decode row at that length brings."""

    def __init__(
        self,
        *,
        num_pages=64,
        page_tokens=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_drafts=0,
        accept=lambda length: 1,
    ):
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_drafts = num_drafts
        self.log = []  # every plan, as plain values
        self.unread = []  # [(epoch, {page: request that wrote it})]
        self._accept = accept
        self._target = np.full((num_pages, page_tokens), np.nan)
        self._draft = np.full((num_pages, page_tokens), np.nan)
        self._rows: dict[int, _Row] = {}
        self._tables: dict[Request, tuple[int, ...]] = {}
        self._written: dict[int, Request] = {}
        self._epoch = 0

    def check(self, request: Request) -> None:
        """Any token will do."""

    def dispatch(self, plan: StepPlan) -> _Pending:
        self._check(plan)
        self.log.append(
            (plan.epoch, [(r.request.id, r.row, r.start, r.num_tokens, r.emit, r.new, r.pages) for r in plan.rows])
        )
        self._take(plan)
        self._written = {}
        num_rows = len(plan.rows) + 1  # one of padding
        tokens = np.full((num_rows, plan.num_drafts + 1), -7, np.int32)
        accepted = np.full(num_rows, 99, np.int32)
        for i, row in enumerate(plan.rows):
            k = plan.num_drafts
            new = self._chunk(row, k) if row.tokens is not None else self._decode(row, k)
            tokens[i, : len(new)], accepted[i] = new, len(new)
        self.unread.append((plan.epoch, self._written))
        return _Pending(self, plan, StepResult(tokens, accepted, _logprobs(tokens)))

    def _check(self, plan: StepPlan) -> None:
        self._epoch += 1
        assert plan.epoch == self._epoch
        assert plan.rows and plan.num_tokens <= self.max_num_batched_tokens
        assert len(self.unread) <= 1, "two steps in flight at most"
        for name in ("row", "request"):
            assert len({getattr(row, name) for row in plan.rows}) == len(plan.rows), f"two plans for one {name}"
        assert 0 <= plan.num_drafts <= self.num_drafts
        kinds = [row.tokens is None for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        for row in plan.rows:
            assert 0 <= row.row < self.max_num_seqs and row.num_tokens >= 1
            assert len(row.pages) <= -(-row.request.limit // self.page_tokens)
            assert len(set(row.pages)) == len(row.pages) and all(0 < p < self.num_pages for p in row.pages)
            for page in row.pages[row.request.matched // self.page_tokens :]:
                for _, written in self.unread:
                    assert written.get(page, row.request) is row.request, "a step in flight may still write the page"

    def _take(self, plan: StepPlan) -> None:
        """Empties the pages the plan took, which are those that its tables did not have before and that are no hits."""
        new = []
        for row in plan.rows:
            had = row.request.matched // self.page_tokens if row.new else len(self._tables[row.request])
            assert row.new or row.pages[:had] == self._tables[row.request]
            new += row.pages[had:]
            self._tables[row.request] = row.pages
        assert sorted(new) == sorted(plan.taken) and len(set(new)) == len(new)
        for page in plan.taken:
            self._target[page] = self._draft[page] = np.nan

    def _chunk(self, row, k: int) -> list[int]:
        request, end = row.request, row.start + row.num_tokens
        if row.new:
            self._rows[row.row] = _Row(request, request.matched, request.limit, row.start)
            assert row.start == max(request.matched - 1, 0)
            assert request.matched % self.page_tokens == 0 and request.matched < len(row.pages) * self.page_tokens
            hit = request.tokens[: request.matched]
            assert self._read(self._target, row, 0, request.matched) == hit
            assert self._read(self._draft, row, 1, request.matched) == hit[1:]
        state = self._rows[row.row]
        assert state.request is request and state.length == row.start
        assert list(row.tokens) == request.tokens[row.start : end]
        assert row.emit == (end == request.num_tokens)
        assert row.next_token == (-1 if row.emit else request.tokens[end])
        for slot, token in enumerate(row.tokens, row.start):
            if slot >= state.matched:
                self._write(self._target, row, slot, token)
        for slot, token in enumerate(row.tokens[1:], row.start + 1):
            self._write(self._draft, row, slot, token)
        state.length = end
        if not row.emit:
            self._write(self._draft, row, end, row.next_token)
            return []
        self._sample(row, state)
        self._write(self._draft, row, end, state.last)
        self._provisional(row, state, k)
        return [state.last]

    def _decode(self, row, k: int) -> list[int]:
        state = self._rows[row.row]
        assert state.request is row.request and not row.new and row.emit and row.num_tokens == k + 1
        assert state.length <= row.start, "the host's start is the most it can be"
        assert self.num_drafts or state.length == row.start
        # Drafts beyond those that the step before made are nothing that could be accepted.
        count = min(self._accept(state.length), min(k, state.drafted) + 1, state.limit - state.length - 1)
        if count <= 0:  # its last token is in a step that the host has not read
            return []
        assert 1 <= count <= k + 1
        for slot in range(state.length + 1, state.length + k + 1):
            self._write(self._target, row, slot, REJECTED)
        new = []
        for _ in range(count):
            self._write(self._target, row, state.length, state.last)
            state.length += 1
            self._sample(row, state)
            self._write(self._draft, row, state.length, state.last)
            new.append(state.last)
        self._provisional(row, state, k)
        return new

    def _sample(self, row, state: _Row) -> None:
        tokens = self._read(self._target, row, 0, state.length)
        assert self._read(self._draft, row, 1, state.length) == tokens[1:]
        request = state.request
        state.last = next_token(tokens, len(request.prompt), request.params, request.seed, request.choice)

    def _provisional(self, row, state: _Row, k: int) -> None:
        state.drafted = k
        for ahead in range(1, k):
            self._write(self._draft, row, state.length + ahead, REJECTED)

    def _write(self, memory, row, slot: int, token: int) -> None:
        if slot >= row.request.limit:
            return
        page = row.pages[slot // self.page_tokens]
        assert self._written.setdefault(page, row.request) is row.request, "two requests write one page"
        memory[page, slot % self.page_tokens] = token

    def _read(self, memory, row, start: int, stop: int) -> list[int]:
        values = [memory[row.pages[slot // self.page_tokens], slot % self.page_tokens] for slot in range(start, stop)]
        assert not np.isnan(values).any(), "a slot that was never written is read"
        return [int(value) for value in values]


def _logprobs(tokens: np.ndarray) -> RowLogprobs:
    """The chosen token's logprob is minus its id; the best are its id, the next, …, with logprobs 0, −1, …"""
    ids = (tokens[..., None] + np.arange(VOCAB, dtype=np.int32)) % VOCAB
    values = np.broadcast_to(-np.arange(VOCAB, dtype=np.float32), ids.shape)
    return RowLogprobs(chosen=-tokens.astype(np.float32), ids=ids, values=values, rank=tokens + 1)
