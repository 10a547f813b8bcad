"""Routes, each with what the OpenAPI document says of it.

Bodies are read by hand, so that their errors are the server's own; all that a framework above Starlette would add is this
document, for a sixth of a request's time.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dcpjax.server.protocol import Body

Handler = Callable[[Request], Awaitable[Response]]

_ERROR = {
    "description": "Refused",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {"type": "object", "required": ["message", "type"]}},
            }
        }
    },
}
REFUSED = {"4XX": _ERROR, "503": _ERROR}
UNAVAILABLE = {"503": {"description": "Loading, ending, or the engine has failed"}}
JSON = {"application/json": {"schema": {"type": "object"}}}
STREAM: dict[str, Any] = {"text/event-stream": {}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}


class Routes:
    """Collects routes, for Starlette, and their document.

    title, version: of the document.
    """

    def __init__(self, title: str, version: str):
        self._info = {"title": title, "version": version}
        self._paths: dict[str, dict[str, Any]] = {}
        self.routes: list[Route] = []

    def add(
        self,
        methods: Sequence[str],
        path: str,
        gives: dict[str, Any] | None = None,
        refuses: dict[str, Any] = REFUSED,
        asks: type[Body] | None = None,
        query: Sequence[dict[str, Any]] = (),
    ) -> Callable[[Handler], Handler]:
        """Decorates a handler. gives: contents of a success by media type, None: it is empty. refuses: other answers, by
        status. asks: the model of the body. query: OpenAPI parameters."""
        said: dict[str, Any] = {"responses": {"200": {"description": "Answered", "content": gives or {}}, **refuses}}
        if asks is not None:
            content = {"application/json": {"schema": asks.model_json_schema()}}
            said["requestBody"] = {"required": True, "content": content}
        names = re.findall(r"{(\w+)", path)
        parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
        if parameters or query:
            said["parameters"] = [*parameters, *query]

        def take(handler: Handler) -> Handler:
            self.routes.append(_route(path, handler, methods))
            place = self._paths.setdefault(re.sub(r":\w+}", "}", path), {})
            for method in map(str.lower, methods):
                place[method] = {"operationId": f"{method}_{handler.__name__}", **said}
            return handler

        return take

    def hide(self, path: str) -> Callable[[Handler], Handler]:
        """Decorates the handler of a page that the document leaves out."""

        def take(handler: Handler) -> Handler:
            self.routes.append(_route(path, handler, ["GET"]))
            return handler

        return take

    def document(self) -> dict[str, Any]:
        """All routes so far, as OpenAPI 3.1 has them."""
        return {"openapi": "3.1.0", "info": self._info, "paths": self._paths}


def _route(path: str, handler: Handler, methods: Sequence[str]) -> Route:
    """With these methods and no other: Starlette adds HEAD to GET, for which a feed would never end."""
    route = Route(path, handler, methods=list(methods))
    route.methods &= set(methods)
    return route
