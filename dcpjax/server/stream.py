"""Server-sent events, and noticing that a client has gone."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpjax.server.errors import ApiError, ClientGone, internal
from dcpjax.server.ticket import Ticket, Update

log = logging.getLogger("dcpjax.server")

# Nobody's text: a frame is cut where it stands.
_MARK = "\ufdd0"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(value: dict) -> bytes:
    """A server-sent event whose data is `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class TextFrame:
    """Frames of events that differ in one text only; to write all of it each time takes three times as long.

    event: of a text. It may hold it at several places.
    """

    def __init__(self, event: Callable[[str], dict]):
        self._parts = frame(event(_MARK)).split(orjson.dumps(_MARK))

    def of(self, text: str) -> bytes:
        """The frame of the event of `text`."""
        return orjson.dumps(text).join(self._parts)


@dataclasses.dataclass(frozen=True)
class Frames:
    """How events are written: an event, an error in their midst, with the number of events before it, and what ends all streams. ping: an event for whenever
    nothing else came for `ping_seconds`; None: there is none."""

    event: Callable[[dict], bytes] = frame
    error: Callable[[ApiError, int], bytes] = lambda error, number: frame(error.body())
    end: bytes = b"data: [DONE]\n\n"
    ping: dict | None = None
    ping_seconds: float = 10.0


OPENAI = Frames()


class Answer(Protocol):
    """What a protocol makes of a ticket's updates: events, or frames that are written already. It knows nothing of the network,
    and nothing in it waits."""

    def begin(self) -> Sequence[dict | bytes]:
        """The events before all updates."""
        ...

    def take(self, update: Update) -> Sequence[dict | bytes]:
        """The events that an update brings."""
        ...

    def end(self) -> Sequence[dict]:
        """The events after the last update. Raises `ApiError` if the answer must not pass for a whole one."""
        ...


@contextlib.asynccontextmanager
async def attended(ticket: Ticket, receive: Receive) -> AsyncIterator[None]:
    """Aborts the ticket when the client goes away, and when the block is left before its jobs have ended.

    The request's body must have been read: from then on all there is to receive is the disconnect.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.leave()

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()
        ticket.close()


class EventStream(Response):
    """Sends an answer's events as they come, then what ends a stream, after an error too. Events that come at once are
    written at once: to write costs as much as all the rest."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, answer: Answer, frames: Frames = OPENAI):
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # of the empty body that the base class assumes
        self._ticket = ticket
        self._answer = answer
        self._frames = frames
        self._num_events = 0  # so far, pings not counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response, as ASGI has it."""
        try:
            async with attended(self._ticket, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    # In a task of its own: each token would wake up all that has called this, one after the other.
                    await asyncio.ensure_future(self._send_updates(scope.get("chunks_to", send)))
                    last = self._written(self._answer.end())
                except ApiError as error:
                    last = self._frames.error(error, self._num_events)
                except (ClientGone, OSError):
                    raise
                except Exception:
                    log.exception("a stream failed")
                    last = self._frames.error(internal(scope.get("request_id", "-")), self._num_events)
                await send({"type": "http.response.body", "body": last + self._frames.end, "more_body": False})
        except (ClientGone, OSError):
            log.debug("client went away: %s", scope["path"])

    async def _send_updates(self, send: Send) -> None:
        """send: what the server gave, since each wrapper around it costs as much as a chunk's JSON."""
        ticket, answer, frames = self._ticket, self._answer, self._frames
        idle = None if frames.ping is None else frames.ping_seconds
        events = answer.begin()
        self._num_events = len(events)
        while True:
            if events:
                await send({"type": "http.response.body", "body": self._written(events), "more_body": True})
            if ticket.over:
                return
            updates = await ticket.news(idle)
            if not updates:
                events = [frames.ping]
                continue
            events = [event for update in updates for event in answer.take(update)]
            self._num_events += len(events)

    def _written(self, events: Sequence[dict | bytes]) -> bytes:
        write = self._frames.event
        return b"".join([event if type(event) is bytes else write(event) for event in events])
