"""The loop that runs the engine, in a process that does nothing else.

    front ── Add, Drop, Cut ──▶ commands ──▶ add, abort, step ── one News a step ──▶ front

Nobody but the loop touches the engine, and it never waits for a client.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from dcpjax.engine import Delta, EngineCore
from dcpjax.errors import RequestError
from dcpjax.host.keys import PageKeys
from dcpjax.host.request import Grammar, Request, SamplingParams
from dcpjax.server.errors import bad_request
from dcpjax.server.watch import Watch
from dcpjax.server.wire import Job, News, carried

# Seconds after which the front hears of steps even if they bring nothing, as those of a long prompt do: it must know that
# the engine gets on.
_SILENCE = 1.0


class Model(Protocol):
    """What the loop needs of an `LLM`."""

    @property
    def engine(self) -> EngineCore:
        """The engine, which only the loop may touch."""

    def add(self, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """As `LLM.add`; `more`: as `EngineCore.add` takes it. Raises `RequestError` for what can never run."""


class Observer(Protocol):
    """Is told what happens to requests; see `Metrics`."""

    def tokens(self, request: Request, count: int, since_last: float | None) -> None:
        """`count` tokens came; `since_last`: seconds since those before, None for the first."""

    def finished(self, request: Request) -> None:
        """The request has ended, for whatever reason."""


class ReadyJob(NamedTuple):
    """A job with what can be made of it outside the loop. prompt: its ids. keys: of its prompt's pages."""

    job: Job
    prompt: list[int]
    grammar: Grammar | None
    keys: PageKeys | None


@dataclasses.dataclass(slots=True)
class _Live:
    """A request in the engine, and how much of it has been told. whole: see `Add`."""

    request: Request
    ticket: int
    index: int
    whole: bool
    num_tokens: int = 0
    last_time: float | None = None


class EngineLoop:
    """Runs `model.engine` while it has work. tell: takes what there is to say, after commands and after every step."""

    def __init__(self, model: Model, observer: Observer, watch: Watch, tell: Callable[[News], None]):
        self._model = model
        self._observer = observer
        self._watch = watch
        self._tell = tell
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._live: dict[str, _Live] = {}
        self._told = (0, 0)  # requests that wait and live, as of the last news
        self._told_at = 0.0
        self._taken: list[tuple[int, int, Exception | None]] = []  # not told yet
        self._rows: list[tuple] = []  # not told yet

    def call(self, command: Callable[[], None]) -> None:
        """From any thread: `command` is called in the loop, between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """From any thread: `run` returns after the step it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """Until `stop`. Raises whatever the engine does: it is of no use then."""
        engine = self._model.engine
        while True:
            with self._wake:
                while not self._commands and not self._stopping and not engine.has_work:
                    self._wake.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, collections.deque()
            if commands:
                for command in commands:
                    command()
                self._report()
            if engine.has_work:
                self._watch.step(self._step)

    # Commands: to be called in the loop.

    def add(self, ticket: int, jobs: Sequence[ReadyJob], whole: bool) -> None:
        """Takes all of the jobs, or none if the engine refuses one."""
        added: list[_Live] = []
        try:
            for index, (job, prompt, grammar, keys) in enumerate(jobs):
                request = self._model.add(
                    prompt,
                    job.params,
                    choice=job.choice,
                    cache_salt=job.cache_salt,
                    no_store=job.no_store,
                    grammar=grammar,
                    priority=job.priority,
                    keys=keys,
                )
                added.append(_Live(request, ticket, index, whole))
        except Exception as error:  # noqa: BLE001 - one odd request must not end the others
            for live in added:
                self._model.engine.abort(live.request.id)
            self.refuse(ticket, len(jobs), error)
            return
        self._live.update((live.request.id, live) for live in added)
        self._taken.append((ticket, len(jobs), None))

    def refuse(self, ticket: int, count: int, error: Exception) -> None:
        """None of the ticket's `count` jobs is taken."""
        self._taken.append((ticket, count, bad_request(error) if isinstance(error, RequestError) else carried(error)))

    def drop(self, ticket: int) -> None:
        """Ends the ticket's jobs; nothing more is told of them."""
        for request_id in self._of(ticket):
            live = self._live.pop(request_id)
            self._model.engine.abort(request_id)
            self._observer.finished(live.request)

    def cut(self, ticket: int | None) -> None:
        """Ends the ticket's jobs, None: all jobs, with a last row each, reason "abort"."""
        engine = self._model.engine
        ended = engine.abort_all() if ticket is None else [engine.abort(request_id) for request_id in self._of(ticket)]
        self._publish(delta for delta in ended if delta is not None)

    def _of(self, ticket: int) -> list[str]:
        return [request_id for request_id, live in self._live.items() if live.ticket == ticket]

    def _step(self) -> None:
        self._publish(self._model.engine.step())
        self._report()

    def _report(self) -> None:
        taken, rows, now = self._taken, self._rows, time.monotonic()
        numbers = len(self._model.engine.scheduler.waiting), len(self._live)
        if not (taken or rows) and numbers == self._told and now - self._told_at < _SILENCE:
            return
        self._taken, self._rows, self._told, self._told_at = [], [], numbers, now
        self._tell(News(*numbers, taken, rows))

    def _publish(self, deltas: Iterable[Delta]) -> None:
        now, all_live, rows = time.monotonic(), self._live, self._rows
        for delta in deltas:
            live = all_live.get(delta.request.id)
            if live is None:  # its reader has gone
                continue
            self._observe(live, delta, now)
            if delta.finished or not (live.whole and live.num_tokens):
                rows.append(self._row(live, delta.finished))

    def _observe(self, live: _Live, delta: Delta, now: float) -> None:
        if delta.token_ids:
            since_last = None if live.last_time is None else now - live.last_time
            live.last_time = now
            self._observer.tokens(delta.request, len(delta.token_ids), since_last)
        if delta.finished:
            del self._live[delta.request.id]
            self._observer.finished(delta.request)

    def _row(self, live: _Live, finished: bool) -> tuple:
        # Text, tokens and logprobs as they are now: a request that is aborted may have more than its delta says, if a step
        # was read whose deltas are still to come.
        request = live.request
        known, verified, output = live.num_tokens, request.verified_drafts, request.output
        live.num_tokens = len(output)
        # By place, as `Row` has them: this is done for every token of every stream.
        return (
            live.ticket,
            live.index,
            "" if request.text is None else request.text.take(),
            output[known:],
            request.logprobs[known:] if request.logprobs else [],
            request.cached_tokens or 0,
            (request.accepted_drafts, verified - request.accepted_drafts) if verified else None,
            request.finish_reason if finished else None,
            request.stop_reason if finished else None,
            request.prompt_logprobs if finished or not known else [],
        )
