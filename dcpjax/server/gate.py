"""In front of all routes: ids of requests, browsers' questions, keys, the server's phase. Plain ASGI: it buffers nothing."""

import asyncio
import hashlib
import random
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcpjax.server.errors import ApiError, route_path, unavailable
from dcpjax.server.service import Service

# Routes that need neither a key nor a model. All others do, whatever they are: what is forgotten here is shut.
_OPEN = frozenset({"/", "/health", "/ready", "/ping", "/metrics", "/version", "/openapi.json"})


class Gate:
    """Lets in who has a key, while there is a model to answer; counts who is inside."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._keys = _digests(service.options.api_keys)

    @classmethod
    def around(cls, app: ASGIApp, service: Service) -> ASGIApp:
        """`app` behind a gate, behind the answers to what browsers ask first (CORS), behind the ids of requests."""
        cors = service.options.cors
        inner = CORSMiddleware(
            cls(app, service),
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
        )
        return _named(inner, service.options.request_id_headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, service = Headers(scope=scope), self._service
        path = route_path(scope)
        if path not in _OPEN and scope["method"] != "OPTIONS":
            try:
                self._check_key(headers)
                service.admit(scope["method"])
            except ApiError as error:
                await error.response(path)(scope, receive, send)
                return
        service.num_inflight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            service.num_inflight -= 1

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digests([key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")])[0]
        # All of them are compared, in constant time: how long it takes tells nothing.
        if not sum(secrets.compare_digest(given, known) for known in self._keys):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _named(app: ASGIApp, shown: bool) -> ASGIApp:
    """`app`, whose requests have an id. shown: whether answers carry it."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        name = Headers(scope=scope).get("x-request-id", "")[:200] or f"{random.getrandbits(128):032x}"
        begun = False

        async def send_on(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if shown:
                    MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        scope["request_id"] = name
        scope["chunks_to"] = send  # past all wrappers: they look at the start of an answer only
        try:
            await app(scope, receive, send_on)
        except asyncio.CancelledError:
            # The server ends and waits no longer: for a body that does not come, as a rule.
            if begun:
                raise
            await unavailable("The server is ending.").response(route_path(scope))(scope, receive, send_on)
        finally:
            del scope["chunks_to"]  # it knows the scope: the two would wait, with the request's body, for the collector

    return enter


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]
