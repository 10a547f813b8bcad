"""Server-sent events, and noticing that a client has gone."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpjax.server.errors import ApiError, ClientGone, internal
from dcpjax.server.ticket import Ticket, Update

log = logging.getLogger("dcpjax.server")

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(value: dict) -> bytes:
    """A server-sent event whose data is `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclasses.dataclass(frozen=True)
class Frames:
    """How events are written: an event, an error in their midst, and what ends all streams."""

    event: Callable[[dict], bytes] = frame
    error: Callable[[ApiError], bytes] = lambda error: frame(error.body())
    end: bytes = b"data: [DONE]\n\n"


OPENAI = Frames()


async def with_pings(ticket: Ticket, seconds: float) -> AsyncGenerator[list[Update] | None]:
    """The ticket's updates; None whenever nothing came for `seconds`."""
    updates = aiter(ticket)
    waiting = asyncio.ensure_future(anext(updates, None))
    try:
        while True:
            await asyncio.wait([waiting], timeout=seconds)
            if not waiting.done():
                yield None
                continue
            found = waiting.result()
            if found is None:
                return
            waiting = asyncio.ensure_future(anext(updates, None))
            yield found
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await waiting
        await updates.aclose()


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
    """Sends `events` as they come, then what ends a stream, after an error too."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncGenerator[dict], frames: Frames = OPENAI):
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # of the empty body that the base class assumes
        self._ticket = ticket
        self._events = events
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with contextlib.aclosing(self._events), attended(self._ticket, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for event in self._events:
                        await write(self._frames.event(event))
                except ApiError as error:
                    await write(self._frames.error(error))
                except ClientGone:
                    raise
                except Exception:
                    log.exception("a stream failed")
                    await write(self._frames.error(internal(scope.get("request_id", "-"))))
                await write(self._frames.end, more=False)
        except (ClientGone, OSError):
            log.debug("client went away: %s", scope["path"])
