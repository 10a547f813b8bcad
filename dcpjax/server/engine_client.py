"""What the front holds of the engine process: tickets, questions, and what is known of its state."""

import asyncio
import logging
import re
import socket
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from dcpjax.server.errors import ApiError
from dcpjax.server.ticket import NOTHING, Prediction, Ticket, TicketLimits, Update
from dcpjax.server.wire import Add, Ask, Cut, Died, Drop, Failed, Job, ModelFacts, News, Stop, Told, Unpacker, pack

log = logging.getLogger("dcpjax.server")


class Process(Protocol):
    """What the client needs of the engine process; see `EngineProcess`."""

    end: socket.socket

    def ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""

    def fate(self) -> str:
        """How it ended, in words."""


class LoadError(Exception):
    """The model could not be loaded. code: the server's exit code. The message is empty if the log has it."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class EngineClient:
    """Make it in the event loop that reads the tickets.

    on_death: called in the event loop when the engine fails; all tickets have been failed then.
    """

    def __init__(self, process: Process, limits: TicketLimits, on_death: Callable[[], None]):
        self.loop = asyncio.get_running_loop()
        self.dead = False
        self._process = process
        self._limits = limits
        self._on_death = on_death
        self._loaded: asyncio.Future[ModelFacts] = self.loop.create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._stopping = False
        self._outgoing: list[bytes] = []  # messages of this turn of the loop
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._num_made = 0  # tickets and questions
        self._num_entering = 0  # jobs on their way to the engine
        self._num_waiting = self._num_live = 0  # as of the last news
        self._last_news = time.monotonic()
        self._questions: dict[int, asyncio.Future] = {}
        self._open: dict[int, Ticket] = {}  # of which something is still to be told
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()  # that somebody holds

    async def loaded(self) -> ModelFacts:
        """Waits until the model is loaded. Raises `LoadError`. To be called once, before anything else."""
        self._transport, _ = await self.loop.create_unix_connection(lambda: _Receiver(self), sock=self._process.end)
        return await self._loaded

    async def close(self, seconds: float) -> bool:
        """Ends the engine process after the step it is in, and the way to it; False if it takes longer."""
        self._stopping = True
        self._send(Stop())
        ended = await asyncio.to_thread(self._process.ended, seconds)
        if not self._lost.done():
            self._transport.abort()
            await self._lost
        return ended

    def stalled(self, seconds: float) -> bool:
        """Whether there are requests, but no step has ended for so long."""
        return self._has_work and time.monotonic() - self._last_news > seconds

    @property
    def _has_work(self) -> bool:
        return self._num_live + self._num_entering > 0

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may."""
        return self._num_waiting + self._num_entering >= self._limits.most_waiting

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
        if not self._has_work:
            self._last_news = time.monotonic()  # nothing was to be heard of an idle engine
        number = self._next()
        ticket = Ticket(self, number, len(jobs), name, self._limits)
        self._open[number] = ticket
        self._tickets.add(ticket)
        self._num_entering += len(jobs)
        self._send(Add(number, list(jobs), whole))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Ends the ticket's jobs within a step; nothing more is delivered."""
        if self._open.pop(ticket.number, None) is not None:
            self._send(Drop(ticket.number))

    def cut(self, names: Collection[str]) -> None:
        """Ends the jobs of tickets of these names, each with a last update, reason "abort"."""
        wanted = {re.sub("^(chatcmpl-|cmpl-|msg_|resp_)", "", name) for name in names}
        for ticket in tuple(self._tickets):
            if ticket.name in wanted:
                self.cut_ticket(ticket)

    def cut_ticket(self, ticket: Ticket) -> None:
        """Ends the ticket's jobs with a last update each."""
        self._send(Cut(ticket.number))

    def abort_all(self) -> None:
        """Ends every job with a last update, reason "abort"."""
        self._send(Cut(None))

    async def ask[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function(side, *arguments)` gives in the engine process, between two steps; side: its `EngineSide`.

        Function and arguments must be such that they can be pickled. Raises `ApiError` if the engine is dead, or dies of it.
        """
        return await self._ask(function, arguments, None)

    async def ask_aside[T](self, function: Callable[..., T], *arguments: Any, threads: str = "aside") -> T:
        """The same, in another thread of the engine process: the engine goes on meanwhile, and the answer does not wait
        for its step. threads: see `Ask`. Raises what `function` raises, too."""
        return await self._ask(function, arguments, threads)

    async def _ask(self, function: Callable[..., Any], arguments: tuple, threads: str | None) -> Any:
        if self.dead:
            raise _death()
        number = self._next()
        done = self._questions[number] = self.loop.create_future()
        try:
            self._send(Ask(number, function, arguments, threads))
            return await done
        finally:
            del self._questions[number], done  # an error that it raises knows this frame

    def hear(self, message: Any) -> None:
        """Takes a message of the engine process."""
        match message:
            case News(waiting, live, taken, rows):
                self._num_waiting, self._num_live, self._last_news = waiting, live, time.monotonic()
                for number, count, error in taken:
                    self._take(number, count, error)
                self._deliver(rows)
            case Told(number, value, error):
                done = self._questions.get(number)
                if done is None or done.done():  # whoever asked has gone
                    return
                if error is None:
                    done.set_result(value)
                else:
                    done.set_exception(error)
            case ModelFacts():
                self._loaded.set_result(message)
            case Failed(code, text):
                self._loaded.set_exception(LoadError(code, text))
            case Died():
                self._die()

    def lost(self) -> None:
        """The engine process has gone."""
        self._lost.set_result(None)
        if self._stopping:
            return
        if not self._loaded.done():
            self._loaded.set_exception(LoadError(1, f"{self._process.fate()} while it loaded the model"))
        elif not (self.dead or self._loaded.exception()):
            log.error("%s; the server ends", self._process.fate())
            self._die()

    def _take(self, number: int, count: int, error: Exception | None) -> None:
        self._num_entering -= count
        ticket = self._open.get(number) if error is None else self._open.pop(number, None)
        if ticket is not None:
            ticket.settle(error)

    def _deliver(self, rows: Sequence[tuple]) -> None:
        tickets = self._open
        for number, index, text, ids, logprobs, cached, prediction, finish, stop, prompt in rows:
            ticket = tickets.get(number)
            if ticket is None:  # its reader has gone
                continue
            known = NOTHING if prediction is None else Prediction(*prediction)
            if ticket.deliver(Update(index, text, ids, logprobs, cached, known, finish, stop, prompt)):
                del tickets[number]

    def _die(self) -> None:
        self.dead = True
        self._open.clear()
        for ticket in tuple(self._tickets):
            ticket.fail(_death())
        for done in self._questions.values():
            if not done.done():
                done.set_exception(_death())
        self._on_death()

    def _send(self, message: Any) -> None:
        self._outgoing.append(pack(message))
        if len(self._outgoing) == 1:
            self.loop.call_soon(self._flush)  # all of one turn of the loop at once: to write and to be woken up is dear

    def _flush(self) -> None:
        data, self._outgoing = b"".join(self._outgoing), []
        if not (self.dead or self._transport.is_closing()):
            self._transport.write(data)

    def _next(self) -> int:
        self._num_made += 1
        return self._num_made


class _Receiver(asyncio.Protocol):
    """Bytes of the engine process → messages for the client."""

    def __init__(self, client: EngineClient):
        self._client = client
        self._unpacker = Unpacker()

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.take(data):
            self._client.hear(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost()


def _death() -> ApiError:
    return ApiError(500, "The engine has failed; the server is ending.")
