"""The jobs of one HTTP request, as the front sees them: whether they run, and what is new of them.

A ticket keeps what a slow reader has not taken as a few merged updates a choice, so its memory is bounded by the text and
the engine never waits for a client.
"""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from dcpjax.host.request import FinishReason, TokenLogprobs
from dcpjax.server.errors import ApiError, ClientGone


class Prediction(NamedTuple):
    """Drafts of a job so far: those that are in its text, and those verified in vain."""

    accepted: int = 0
    rejected: int = 0


NOTHING = Prediction()


class Update(NamedTuple):
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
    # Of the prompt's second token and on: in the first update and the last.
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    def then(self, later: "Update") -> "Update":
        """Both as one."""
        # By place: to replace fields by name takes three times as long, and this is done when there is least time.
        return Update(
            later.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            *later[4:8],
            later.prompt_logprobs or self.prompt_logprobs,
        )


class Engine(Protocol):
    """What a ticket needs of the engine's client."""

    loop: asyncio.AbstractEventLoop

    def abort(self, ticket: "Ticket") -> None:
        """Ends the ticket's jobs; nothing more is delivered."""

    def cut_ticket(self, ticket: "Ticket") -> None:
        """Ends the ticket's jobs with a last update each."""


@dataclasses.dataclass(frozen=True)
class TicketLimits:
    """most_waiting: requests that may wait for the engine. timeout: seconds that a ticket may take, None: no limit.
    interval: tokens of a job that are read at once, but for its first and last ones."""

    most_waiting: int = 1024
    timeout: float | None = None
    interval: int = 1


class Ticket:
    """The jobs of one HTTP request, in the event loop. Iterate it, or ask for `news`; `close` it in any case."""

    def __init__(self, engine: "Engine", number: int, num_jobs: int, name: str, limits: TicketLimits):
        self.number = number
        self.name = name
        self._engine = engine
        self._left = num_jobs  # of which a reader has not seen the end
        self._running = num_jobs  # whose end has not come
        self._interval = limits.interval
        self._begun: set[int] = set()  # jobs that brought something
        self._timer = None if limits.timeout is None else engine.loop.call_later(limits.timeout, self._expire)
        self._accepted: asyncio.Future[None] | None = engine.loop.create_future()
        self._updates: dict[int, list[Update]] = {}  # each longer than the next, so that merging copies little
        self._awake = False  # there is something to read
        self._waiter: asyncio.Future[None] | None = None  # of the reader
        self._error: Exception | None = None

    async def accepted(self) -> None:
        """Waits until the engine has taken the jobs. Raises `ApiError` if it refuses one: then none runs."""
        try:
            await self._accepted
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        """`news` until there will be no more."""
        while not self.over:
            yield await self.news()

    @property
    def over(self) -> bool:
        """Whether all there was to read has been read."""
        return not self._left

    async def news(self, seconds: float | None = None) -> list[Update]:
        """What is new, as soon as something is; empty if nothing was for so long. Not to be called once it is `over`.

        Raises `ApiError` if the engine dies, `ClientGone` on `leave`.
        """
        if not self._awake:
            if self._error is not None:
                raise self._error
            self._waiter = self._engine.loop.create_future()
            if seconds is None:
                await self._waiter
            elif not (await asyncio.wait((self._waiter,), timeout=seconds))[0]:
                return []
        self._awake = False
        if not self._updates and self._error is not None:
            raise self._error
        updates = [functools.reduce(Update.then, parts) for parts in self._updates.values()]
        self._updates = {}
        for update in updates:
            self._left -= update.finish_reason is not None
        if not self._left:
            self._stop_timer()
        return updates

    def leave(self) -> None:
        """The client is gone: stops the jobs, and whoever iterates."""
        self.fail(ClientGone())
        self._engine.abort(self)

    def close(self) -> None:
        """Nobody reads any more: jobs that are not finished are aborted."""
        self._stop_timer()
        if self._left:
            self._engine.abort(self)
        # An error that was raised knows the frames it came through, and they know the ticket.
        self._left, self._error, self._accepted = 0, None, None

    @property
    def pending(self) -> bool:
        """Whether tokens are still to come."""
        return self._left > 0 and self._error is None

    def settle(self, error: Exception | None) -> None:
        """The engine has taken the jobs, or `error` says why not."""
        if self._accepted is not None and not self._accepted.done():
            if error is None:
                self._accepted.set_result(None)
            else:
                self._accepted.set_exception(error)

    def deliver(self, update: Update) -> bool:
        """Something is new of one job; wakes the reader once there is enough. Returns whether that was all."""
        index, finished = update.index, update.finish_reason is not None
        parts = self._updates.setdefault(index, [])
        while parts and len(parts[-1].token_ids) <= len(update.token_ids):
            update = parts.pop().then(update)
        parts.append(update)
        self._running -= finished
        if (
            finished
            or index not in self._begun
            or self._interval <= 1
            or sum(len(part.token_ids) for part in parts) >= self._interval
        ):
            self._begun.add(index)
            self._wake()
        return not self._running

    def fail(self, error: Exception) -> None:
        """Whoever waits or iterates gets `error`."""
        self.settle(error)
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        if self._begun:
            self._engine.cut_ticket(self)
        else:
            self.fail(ApiError(504, "No token came within --request-timeout; try again when there is less to do."))
            self._engine.abort(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
