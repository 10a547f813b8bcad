"""The HTTP application: routes, and the gate in front of them."""

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from typing import Any

import fastapi
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import dcpjax
from dcpjax.server import errors, prefix_cache, text_routes
from dcpjax.server.answers import JsonResponse
from dcpjax.server.chat import chat_completions
from dcpjax.server.completions import completions
from dcpjax.server.errors import ApiError
from dcpjax.server.metrics import CONTENT_TYPE
from dcpjax.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body
from dcpjax.server.service import Served, Service

_GUARDED = ("/v1", "/tokenize", "/detokenize", "/reset_prefix_cache")


def make_app(service: Service) -> ASGIApp:
    """The application that serves `service`, whatever phase it is in."""
    app = fastapi.FastAPI(title="dcpjax", version=dcpjax.__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    options = service.options

    async def read[B: Body](request: Request, kind: type[B]) -> B:
        return await read_body(request, kind, options.max_body_bytes)

    @app.post("/v1/chat/completions", **_documented(ChatBody))
    async def post_chat(request: Request) -> Response:
        return await chat_completions(request, await read(request, ChatBody), service.served, options)

    @app.post("/v1/completions", **_documented(CompletionBody))
    async def post_completions(request: Request) -> Response:
        return await completions(request, await read(request, CompletionBody), service.served, options)

    @app.post("/tokenize", **_documented(TokenizeBody))
    async def post_tokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.tokenize(await read(request, TokenizeBody), service.served, options))

    @app.post("/detokenize", **_documented(DetokenizeBody))
    async def post_detokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.detokenize(await read(request, DetokenizeBody), service.served))

    @app.post("/reset_prefix_cache")
    async def post_reset(request: Request) -> Response:
        await prefix_cache.reset(request, service.served)
        return Response()

    @app.get("/v1/models")
    async def get_models() -> Response:
        served = service.served
        return JsonResponse({"object": "list", "data": [_model_card(served, name) for name in served.names]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        service.served.check_model(name)
        return JsonResponse(_model_card(service.served, name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def get_health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.get("/version")
    async def get_version() -> Response:
        return JsonResponse({"version": dcpjax.__version__})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(service.served.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return Gate(app, service)


class Gate:
    """Lets in who has a key, while there is a model to answer; counts who is inside. Plain ASGI: it buffers nothing."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._keys = _digests(service.options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = uuid.uuid4().hex
        service = self._service
        if scope["path"].startswith(_GUARDED) and scope["method"] != "OPTIONS":
            try:
                self._check_key(Headers(scope=scope))
                service.admit(scope["method"])
            except ApiError as error:
                await error.response()(scope, receive, send)
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


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _documented(kind: type[Body]) -> dict[str, Any]:
    """The body in the schema; it is read by hand, so that its errors are our own."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _model_card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "dcpjax",
        "root": served.llm.name,
        "parent": None,
        "max_model_len": served.llm.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{hashlib.sha256(name.encode()).hexdigest()[:24]}",
                "object": "model_permission",
                "created": served.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
