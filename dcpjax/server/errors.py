"""What a client is told when something goes wrong: one object for every route, without paths or tracebacks."""

import logging

import orjson
import starlette.exceptions
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from dcpjax.errors import NeverFitsError, RequestError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# Routes of the same API that a text model does not have.
_OTHER_MODELS = ("/v1/embeddings", "/v1/audio", "/v1/images", "/pooling", "/score")

_STORED = "/v1/responses/"

log = logging.getLogger("dcpjax.server")


class ApiError(Exception):
    """An answer that is not a success. `param` names the field of the body that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    def __reduce__(self):
        return ApiError, (self.status, self.message, self.param, self.headers)

    def body(self) -> dict:
        """The error object of OpenAI's protocols, with vLLM's words for `type`."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict:
        """The error object of Anthropic's protocol."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """In the shape of the protocol that `path` belongs to."""
        body = self.anthropic_body() if path.startswith(_ANTHROPIC) else self.body()
        return Response(orjson.dumps(body), self.status, self.headers, media_type="application/json")


def route_path(scope: Scope) -> str:
    """The path that routes have: without the prefix that a proxy took away and the server put back (`--root-path`)."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def bad_request(error: RequestError) -> ApiError:
    """A refused request; its message begins with the name of the field."""
    field, colon, _ = str(error).partition(":")
    return ApiError(
        503 if isinstance(error, NeverFitsError) else 400, str(error), field if colon and field.isidentifier() else None
    )


def unavailable(message: str, retry_after: int | None = None) -> ApiError:
    """503. retry_after: seconds that the client is told to wait."""
    return ApiError(503, message, headers={} if retry_after is None else {"Retry-After": str(retry_after)})


def internal(request_id: str) -> ApiError:
    """500, which tells the client the request's id and nothing of the cause."""
    return ApiError(500, f"The server failed on request {request_id}; its log says why.")


def install(app: Starlette) -> None:
    """Makes every failure of `app` one of these answers."""

    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(route_path(request.scope))

    async def request_error(request: Request, error: RequestError) -> Response:
        return bad_request(error).response(route_path(request.scope))

    async def http_error(request: Request, error: starlette.exceptions.HTTPException) -> Response:
        path = route_path(request.scope)
        if error.status_code == 404:
            words = "does not exist"
            if path.startswith(_OTHER_MODELS):
                words = "is not supported by this model"
            elif path.startswith(_STORED):
                words += ": this server stores no responses, and one that runs ends with its connection"
            return ApiError(404, f"{request.method} {path[:200]} {words}").response(path)
        if error.status_code == 405:
            allowed = dict(error.headers or {})
            words = f"{request.method} is not allowed on {path[:200]}; use {allowed.get('Allow', 'another method')}"
            return ApiError(405, words, headers=allowed).response(path)
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response(path)

    async def gone(request: Request, error: Exception) -> Response:
        log.debug("client went away: %s", request.url.path)
        return Response(status_code=499)

    async def failure(request: Request, error: Exception) -> Response:
        return internal(request.scope.get("request_id", "-")).response(route_path(request.scope))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(starlette.exceptions.HTTPException, http_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, failure)
