"""Server-sent events, and noticing that a client has gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpjax.server.engine_thread import Ticket
from dcpjax.server.errors import ApiError, ClientGone, internal

log = logging.getLogger("dcpjax.server")

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(value: dict) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


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
    """Sends `events` as they come, then `[DONE]`, after an error too."""

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, events: AsyncGenerator[dict]):
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]  # of the empty body that the base class assumes
        self._ticket = ticket
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with contextlib.aclosing(self._events), attended(self._ticket, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for event in self._events:
                        await write(frame(event))
                except ApiError as error:
                    await write(frame(error.body()))
                except ClientGone:
                    raise
                except Exception:
                    log.exception("a stream failed")
                    await write(frame(internal(scope.get("request_id", "-")).body()))
                await write(b"data: [DONE]\n\n", more=False)
        except (ClientGone, OSError):
            log.debug("client went away: %s", scope["path"])
