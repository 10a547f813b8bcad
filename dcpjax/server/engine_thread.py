"""The one thread that runs the engine, and what the event loop holds of it.

    handlers ── submit ──▶ commands ──▶ ┐
    (event loop)                        │ engine thread: add, abort, step
    Ticket ◀── one call a step ── Update ┘

Nobody else touches the engine, and it never waits for a client.
"""

import asyncio
import collections
import dataclasses
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from dcpjax.engine import Delta, EngineCore
from dcpjax.errors import RequestError
from dcpjax.host.request import Request, SamplingParams
from dcpjax.server.errors import ApiError, bad_request
from dcpjax.server.ticket import Job, Prediction, Ticket, TicketLimits, Update
from dcpjax.server.watch import Watch

log = logging.getLogger("dcpjax.server")

_NOTHING = Prediction()


class Model(Protocol):
    """What the thread needs of an `LLM`."""

    @property
    def engine(self) -> EngineCore:
        """The engine, which only the thread may touch."""

    def add(self, prompt: Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """As `LLM.add`; `more`: as `EngineCore.add` takes it. Raises `RequestError` for what can never run."""


class Observer(Protocol):
    """Is told, in the engine thread, what happens to requests; see `Metrics`."""

    def tokens(self, request: Request, count: int, since_last: float | None) -> None:
        """`count` tokens came; `since_last`: seconds since those before, None for the first."""

    def finished(self, request: Request) -> None:
        """The request has ended, for whatever reason."""


@dataclasses.dataclass
class _Live:
    """A request in the engine, and how much of it has been sent."""

    request: Request
    ticket: Ticket
    index: int
    num_tokens: int = 0
    last_time: float | None = None


class EngineThread:
    """Runs `model.engine` while it has work. Make it in the event loop that reads the tickets.

    on_death: called in the event loop when the engine fails; all tickets have been failed then.
    """

    def __init__(
        self,
        model: Model,
        observer: Observer,
        watch: Watch,
        on_death: Callable[[], None],
        limits: TicketLimits,
    ):
        self.loop = asyncio.get_running_loop()
        self.dead = False
        self._model = model
        self._observer = observer
        self._watch = watch
        self._on_death = on_death
        self._limits = limits
        self._num_entering = 0  # jobs on their way to the engine
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._live: dict[str, _Live] = {}
        self._questions: set[asyncio.Future] = set()  # of the event loop
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()  # of the event loop
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step it is in; False if that takes longer than `timeout` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stalled(self, seconds: float) -> bool:
        """Whether there are requests, but no step has ended for so long."""
        return bool(self._live) and time.monotonic() - self._last_step > seconds

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may."""
        return len(self._model.engine.scheduler.waiting) + self._num_entering >= self._limits.most_waiting

    @property
    def num_tickets(self) -> int:
        """HTTP requests that wait for tokens."""
        return sum(ticket.pending for ticket in self._tickets)

    def submit(self, jobs: Sequence[Job], name: str = "", whole: bool = False) -> Ticket:
        """Hands jobs to the engine, all or none; await `Ticket.accepted` next. Choices of a prompt stand in order.

        name: see `cut`. whole: nobody wants to see a job grow: it brings its first token, and at its end all others.
        Raises `ApiError` if the engine is dead, or too many wait for it.
        """
        if self.dead:
            raise _death()
        if self.full:
            raise ApiError(
                429,
                "Too many requests are waiting (--max-queued-requests); try again later.",
                None,
                {"Retry-After": "1"},
            )
        ticket = Ticket(self, len(jobs), name, whole, self._limits)
        self._tickets.add(ticket)
        self._num_entering += len(jobs)
        self._call(lambda: self._add(ticket, jobs))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Ends the ticket's jobs within a step; nothing more is delivered."""
        self._call(lambda: self._drop(ticket))

    def cut(self, names: Collection[str]) -> None:
        """Ends the jobs of tickets of these names, each with a last update, reason "abort"."""
        wanted = {re.sub("^(chatcmpl-|cmpl-|msg_|resp_)", "", name) for name in names}
        for ticket in tuple(self._tickets):
            if ticket.name in wanted:
                self.cut_ticket(ticket)

    def cut_ticket(self, ticket: Ticket) -> None:
        """Ends the ticket's jobs with a last update each."""

        def cut() -> None:
            ids = [key for key, live in self._live.items() if live.ticket is ticket]
            deltas = [self._model.engine.abort(request_id) for request_id in ids]
            self._publish([delta for delta in deltas if delta is not None])

        self._call(cut)

    def abort_all(self) -> None:
        """Ends every job with a last update, reason "abort"."""
        self._call(lambda: self._publish(self._model.engine.abort_all()))

    async def reset_prefix_cache(self, running: bool) -> bool:
        """See `EngineCore.reset_prefix_cache`. Raises `ApiError` if the engine is dead, or dies of it."""
        return await self.ask(lambda engine: engine.reset_prefix_cache(running))

    async def ask[T](self, question: Callable[[EngineCore], T]) -> T:
        """The answer to a question that is put to the engine in its thread, between two steps.

        Raises `ApiError` if the engine is dead, or dies of it.
        """
        if self.dead:
            raise _death()
        done: asyncio.Future[T] = self.loop.create_future()
        self._questions.add(done)
        self._call(lambda: self._soon(_settle, done, question(self._model.engine)))
        try:
            return await done
        finally:
            self._questions.discard(done)

    def _call(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        engine = self._model.engine
        try:
            while True:
                with self._wake:
                    while not self._commands and not self._stopping and not engine.has_work:
                        self._wake.wait()
                    if self._stopping:
                        return
                    commands, self._commands = self._commands, collections.deque()
                for command in commands:
                    command()
                if engine.has_work:
                    self._watch.step(lambda: self._publish(engine.step()))
                self._last_step = time.monotonic()
        except Exception:
            log.exception("the engine failed; the server ends")
            self._die()

    def _add(self, ticket: Ticket, jobs: Sequence[Job]) -> None:
        self._soon(self._entered, len(jobs))
        added: list[_Live] = []
        try:
            for index, job in enumerate(jobs):
                request = self._model.add(
                    job.prompt,
                    job.params,
                    choice=job.choice,
                    cache_salt=job.cache_salt,
                    no_store=job.no_store,
                    grammar=job.grammar,
                    priority=job.priority,
                )
                added.append(_Live(request, ticket, index))
        except Exception as error:  # noqa: BLE001 - one odd request must not end the others
            for live in added:
                self._model.engine.abort(live.request.id)
            if isinstance(error, RequestError):
                error = bad_request(error)
            self._soon(ticket.settle, error)
            return
        self._last_step = time.monotonic()
        self._live.update((live.request.id, live) for live in added)
        self._soon(ticket.settle, None)

    def _entered(self, count: int) -> None:
        self._num_entering -= count

    def _drop(self, ticket: Ticket) -> None:
        for request_id in [key for key, live in self._live.items() if live.ticket is ticket]:
            live = self._live.pop(request_id)
            self._model.engine.abort(request_id)
            self._observer.finished(live.request)

    def _publish(self, deltas: Sequence[Delta]) -> None:
        updates, now = [], time.monotonic()
        for delta in deltas:
            live = self._live.get(delta.request.id)
            if live is None:  # its reader has gone
                continue
            self._observe(live, delta, now)
            if delta.finished or not (live.ticket.whole and live.num_tokens):
                updates.append((live.ticket, self._update(live, delta)))
        if updates:
            self._soon(_deliver, updates)

    def _observe(self, live: _Live, delta: Delta, now: float) -> None:
        if delta.token_ids:
            since_last = None if live.last_time is None else now - live.last_time
            live.last_time = now
            self._observer.tokens(delta.request, len(delta.token_ids), since_last)
        if delta.finished:
            del self._live[delta.request.id]
            self._observer.finished(delta.request)

    def _update(self, live: _Live, delta: Delta) -> Update:
        # Text, tokens and logprobs as they are now: a request that is aborted may have more than its delta says, if a step
        # was read whose deltas are still to come.
        request = delta.request
        known, verified = live.num_tokens, request.verified_drafts
        live.num_tokens = len(request.output)
        # By place: this is done for every token of every stream.
        return Update(
            live.index,
            "" if request.text is None else request.text.take(),
            request.output[known:],
            request.logprobs[known:],
            request.cached_tokens or 0,
            Prediction(request.accepted_drafts, verified - request.accepted_drafts) if verified else _NOTHING,
            request.finish_reason if delta.finished else None,
            request.stop_reason if delta.finished else None,
            request.prompt_logprobs,
        )

    def _die(self) -> None:
        self.dead = True
        self._live.clear()

        def tell() -> None:
            for ticket in tuple(self._tickets):
                ticket.fail(_death())
            for reset in self._questions:
                if not reset.done():
                    reset.set_exception(_death())
            self._on_death()

        self._soon(tell)

    def _soon(self, call: Callable, *args: object) -> None:
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has ended: nobody is left to be told
            log.debug("the event loop has ended")


def _deliver(updates: Sequence[tuple[Ticket, Update]]) -> None:
    for ticket, update in updates:
        ticket.deliver(update)


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():  # else the client has gone
        future.set_result(value)


def _death() -> ApiError:
    return ApiError(500, "The engine has failed; the server is ending.")
