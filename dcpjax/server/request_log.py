"""`--enable-log-requests`: a line in the log for every request once it is answered, with nothing of what was asked or said."""

import logging
import time
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcpjax.server.errors import route_path

log = logging.getLogger("dcpjax.requests")


class RequestLog:
    """Around an application. quiet: paths of which nothing is written, for monitors ask them every few seconds."""

    def __init__(self, app: ASGIApp, quiet: Collection[str]):
        self._app = app
        self._quiet = frozenset(quiet)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's answer, as ASGI has it."""
        if scope["type"] != "http" or (path := route_path(scope)) in self._quiet:
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_on(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        start = time.monotonic()
        try:
            await self._app(scope, receive, send_on)
        finally:
            # Path and id are the client's: quoted, they cannot pass for lines of ours.
            words = scope["method"], path[:200], status, time.monotonic() - start, scope.get("request_id")
            log.info("%s %r: %s after %.3f s, request %r", *words)
