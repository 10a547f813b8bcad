"""The one thread that runs the engine, and what the event loop holds of it.

    handlers ── submit ──▶ commands ──▶ ┐
    (event loop)                        │ engine thread: add, abort, step
    Ticket ◀── one call a step ── Update ┘

Nobody else touches the engine. A ticket keeps what a slow reader has not taken as one merged update a choice, so its
memory is bounded by the text and the engine never waits for a client.
"""

import asyncio
import collections
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from dcpjax.engine import Delta, EngineCore
from dcpjax.errors import RequestError
from dcpjax.host.request import FinishReason, Request, SamplingParams, TokenLogprobs
from dcpjax.server.errors import ApiError, ClientGone, bad_request
from dcpjax.server.watch import Watch

log = logging.getLogger("dcpjax.server")


class Model(Protocol):
    """What the thread needs of an `LLM`."""

    @property
    def engine(self) -> EngineCore: ...

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        choice: int = 0,
        cache_salt: str | None = None,
        no_store: bool = False,
    ) -> Request: ...


class Observer(Protocol):
    """Is told, in the engine thread, what happens to requests; see `Metrics`."""

    def tokens(self, request: Request, count: int, since_last: float | None) -> None: ...

    def finished(self, request: Request) -> None: ...


@dataclasses.dataclass(frozen=True)
class Job:
    """One choice of one prompt. cache_salt, no_store: see `EngineCore.add`."""

    prompt: list[int]
    params: SamplingParams
    choice: int = 0
    cache_salt: str | None = None
    no_store: bool = False


class Prediction(NamedTuple):
    """Drafts of a job so far: those that are in its text, and those verified in vain."""

    accepted: int = 0
    rejected: int = 0


@dataclasses.dataclass(frozen=True)
class Update:
    """What is new of job `index`; `cached_tokens` and `prediction` are of the whole job so far.

    `finish_reason` is set in the last update of a job, and only there.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cached_tokens: int
    prediction: Prediction
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def then(self, later: "Update") -> "Update":
        """Both as one."""
        return dataclasses.replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
        )


class Ticket:
    """The jobs of one HTTP request, in the event loop. Iterate it for lists of updates; `close` it in any case."""

    def __init__(self, thread: "EngineThread", num_jobs: int):
        self._thread = thread
        self._left = num_jobs
        self._accepted: asyncio.Future[None] = thread.loop.create_future()
        self._updates: dict[int, Update] = {}
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    async def accepted(self) -> None:
        """Waits until the engine has taken the jobs. Raises `ApiError` if it refuses one: then none runs."""
        try:
            await self._accepted
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        """What is new, every time there is something. Raises `ApiError` if the engine dies, `ClientGone` on `leave`."""
        while self._left:
            await self._wake.wait()
            self._wake.clear()
            updates, self._updates = list(self._updates.values()), {}
            self._left -= sum(update.finish_reason is not None for update in updates)
            if updates:
                yield updates
            if self._error is not None:
                raise self._error

    def leave(self) -> None:
        """The client is gone: stops the jobs, and whoever iterates."""
        self.fail(ClientGone())
        self._thread.abort(self)

    def close(self) -> None:
        """Nobody reads any more: jobs that are not finished are aborted."""
        if self._left:
            self._thread.abort(self)

    def settle(self, error: Exception | None) -> None:
        if not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)

    def deliver(self, update: Update) -> None:
        earlier = self._updates.get(update.index)
        self._updates[update.index] = update if earlier is None else earlier.then(update)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self.settle(error)
        self._error = error
        self._wake.set()


@dataclasses.dataclass
class _Live:
    """A request in the engine, and how much of it has been sent."""

    request: Request
    ticket: Ticket
    index: int
    num_logprobs: int = 0
    last_time: float | None = None


class EngineThread:
    """Runs `model.engine` while it has work. Make it in the event loop that reads the tickets.

    on_death: called in the event loop when the engine fails; all tickets have been failed then.
    """

    def __init__(self, model: Model, observer: Observer, watch: Watch, on_death: Callable[[], None]):
        self.loop = asyncio.get_running_loop()
        self.dead = False
        self._model = model
        self._observer = observer
        self._watch = watch
        self._on_death = on_death
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._live: dict[str, _Live] = {}
        self._resets: set[asyncio.Future[bool]] = set()  # of the event loop
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()  # of the event loop
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
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

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Hands jobs to the engine, all or none; await `Ticket.accepted` next. Choices of a prompt stand in order.

        Raises `ApiError` if the engine is dead.
        """
        if self.dead:
            raise _death()
        ticket = Ticket(self, len(jobs))
        self._tickets.add(ticket)
        self._call(lambda: self._add(ticket, jobs))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Ends the ticket's jobs within a step; nothing more is delivered."""
        self._call(lambda: self._drop(ticket))

    def abort_all(self) -> None:
        """Ends every job with a last update, reason "abort"."""
        self._call(lambda: self._publish(self._model.engine.abort_all()))

    async def reset_prefix_cache(self, running: bool) -> bool:
        """Forgets what the prefix cache holds; False, and nothing is changed, while requests use it.

        running: they go back to the queue first. Raises `ApiError` if the engine is dead, or dies of it.
        """
        if self.dead:
            raise _death()
        done: asyncio.Future[bool] = self.loop.create_future()
        self._resets.add(done)

        def reset() -> None:
            self._soon(_settle, done, self._model.engine.reset_prefix_cache(running))

        self._call(reset)
        try:
            return await done
        finally:
            self._resets.discard(done)

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
        added: list[_Live] = []
        try:
            for index, job in enumerate(jobs):
                request = self._model.add(
                    job.prompt, job.params, choice=job.choice, cache_salt=job.cache_salt, no_store=job.no_store
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

    def _drop(self, ticket: Ticket) -> None:
        for request_id in [key for key, live in self._live.items() if live.ticket is ticket]:
            live = self._live.pop(request_id)
            self._model.engine.abort(request_id)
            self._observer.finished(live.request)

    def _publish(self, deltas: Sequence[Delta]) -> None:
        updates = []
        for delta in deltas:
            live = self._live.get(delta.request.id)
            if live is not None:  # else its reader has gone
                updates.append((live.ticket, self._update(live, delta)))
        if updates:
            self._soon(_deliver, updates)

    def _update(self, live: _Live, delta: Delta) -> Update:
        request = delta.request
        if delta.token_ids:
            now = time.monotonic()
            since_last = None if live.last_time is None else now - live.last_time
            live.last_time = now
            self._observer.tokens(request, len(delta.token_ids), since_last)
        if delta.finished:
            del self._live[request.id]
            self._observer.finished(request)
        logprobs = request.logprobs[live.num_logprobs :]
        live.num_logprobs += len(logprobs)
        return Update(
            index=live.index,
            text=request.text.take() if request.text is not None else "",
            token_ids=delta.token_ids,
            logprobs=logprobs,
            cached_tokens=request.cached_tokens or 0,
            prediction=Prediction(request.accepted_drafts, request.verified_drafts - request.accepted_drafts),
            finish_reason=request.finish_reason if delta.finished else None,
            stop_reason=request.stop_reason if delta.finished else None,
        )

    def _die(self) -> None:
        self.dead = True
        self._live.clear()

        def tell() -> None:
            for ticket in tuple(self._tickets):
                ticket.fail(_death())
            for reset in self._resets:
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
