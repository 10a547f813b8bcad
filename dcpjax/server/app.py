"""The HTTP application: every route, by who may call it."""

from typing import Any

import fastapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import dcpjax
from dcpjax.server import dev_routes, errors, live, text_routes
from dcpjax.server.answers import JsonResponse
from dcpjax.server.chat import chat_completions
from dcpjax.server.completions import completions
from dcpjax.server.gate import Gate
from dcpjax.server.messages import count_tokens, messages
from dcpjax.server.messages_body import CountBody, MessagesBody
from dcpjax.server.metrics import CONTENT_TYPE
from dcpjax.server.model_cards import model_card
from dcpjax.server.profile import Profiler
from dcpjax.server.protocol import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from dcpjax.server.responses import responses
from dcpjax.server.responses_body import ResponsesBody
from dcpjax.server.service import Service


def make_app(service: Service) -> ASGIApp:
    """The application that serves `service`, whatever phase it is in."""
    app = fastapi.FastAPI(
        title="dcpjax",
        version=dcpjax.__version__,
        docs_url=None,
        redoc_url=None,
        default_response_class=Response,  # every route says itself what it gives
    )
    errors.install(app)
    _add_answers(app, service)
    _add_models(app, service)
    _add_state(app, service)
    if service.options.dev_endpoints:
        _add_dev(app, service)
    return Gate.around(app, service)


def _add_answers(app: fastapi.FastAPI, service: Service) -> None:
    options = service.options

    async def read[B: Body](request: Request, kind: type[B]) -> B:
        return await read_body(request, kind, options.max_body_bytes)

    @app.post("/v1/chat/completions", **_documented(ChatBody, _JSON | _STREAM))
    async def post_chat(request: Request) -> Response:
        return await chat_completions(request, await read(request, ChatBody), service.served, options)

    @app.post("/v1/completions", **_documented(CompletionBody, _JSON | _STREAM))
    async def post_completions(request: Request) -> Response:
        return await completions(request, await read(request, CompletionBody), service.served, options)

    @app.post("/v1/responses", **_documented(ResponsesBody, _JSON | _STREAM))
    async def post_responses(request: Request) -> Response:
        return await responses(request, await read(request, ResponsesBody), service.served, options)

    @app.post("/v1/messages", **_documented(MessagesBody, _JSON | _STREAM))
    async def post_messages(request: Request) -> Response:
        return await messages(request, await read(request, MessagesBody), service.served, options)

    @app.post("/v1/messages/count_tokens", **_documented(CountBody))
    async def post_count_tokens(request: Request) -> Response:
        return JsonResponse(await count_tokens(await read(request, CountBody), service.served, options))

    @app.post("/tokenize", **_documented(TokenizeBody))
    async def post_tokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.tokenize(await read(request, TokenizeBody), service.served, options))

    @app.post("/detokenize", **_documented(DetokenizeBody))
    async def post_detokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.detokenize(await read(request, DetokenizeBody), service.served))


def _add_models(app: fastapi.FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=_gives(_JSON) | _REFUSED)
    async def get_models() -> Response:
        served = service.served
        return JsonResponse({"object": "list", "data": [model_card(served, name) for name in served.names]})

    @app.get("/v1/models/{name:path}", responses=_gives(_JSON) | _REFUSED)
    async def get_model(name: str) -> Response:
        service.served.check_model(name)
        return JsonResponse(model_card(service.served, name))


def _add_state(app: fastapi.FastAPI, service: Service) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"], responses=_UNAVAILABLE)
    async def get_health() -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @app.api_route("/ping", methods=["GET", "POST"], responses=_UNAVAILABLE)
    async def get_ping() -> Response:
        return await get_health()

    @app.get("/ready", responses=_UNAVAILABLE)
    async def get_ready() -> Response:
        return Response(status_code=200 if service.healthy and not service.served.thread.full else 503)

    @app.get("/version", responses=_gives(_JSON))
    async def get_version() -> Response:
        return JsonResponse({"version": dcpjax.__version__})

    @app.get("/load", responses=_gives(_JSON) | _REFUSED)
    async def get_load() -> Response:
        return JsonResponse({"server_load": service.served.thread.num_tickets})

    @app.get("/metrics", responses=_gives({"text/plain": {"schema": {"type": "string"}}}) | _REFUSED)
    async def get_metrics() -> Response:
        return Response(service.served.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _add_dev(app: fastapi.FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", responses=_REFUSED, openapi_extra=dev_routes.RESET_PARAMETERS)
    async def post_reset(request: Request) -> Response:
        await dev_routes.reset(request, service.served)
        return Response()

    @app.api_route(
        "/flush_cache", methods=["GET", "POST"], responses=_REFUSED, openapi_extra=dev_routes.RESET_PARAMETERS
    )
    async def flush(request: Request) -> Response:
        return await post_reset(request)

    @app.get("/server_info", responses=_gives(_JSON) | _REFUSED)
    async def get_info() -> Response:
        return JsonResponse(dev_routes.info(service.served, service.options))

    @app.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return live.page()

    @app.get("/live", include_in_schema=False)
    async def get_live(request: Request) -> Response:
        return live.feed(request, service)

    profiler = Profiler(service.options.profile_dir)

    @app.post("/start_profile", responses=_gives(_JSON) | _REFUSED)
    async def post_start_profile() -> Response:
        return JsonResponse({"folder": await profiler.start()})

    @app.post("/stop_profile", responses=_gives(_JSON) | _REFUSED)
    async def post_stop_profile() -> Response:
        return JsonResponse({"folder": await profiler.stop()})

    @app.post("/abort_requests", **_documented(AbortBody, {}))
    async def post_abort(request: Request) -> Response:
        body = await read_body(request, AbortBody, service.options.max_body_bytes)
        service.served.thread.cut(body.request_ids)
        return Response()


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
_REFUSED = {"4XX": _ERROR, "503": _ERROR}
_UNAVAILABLE = {"503": {"description": "Loading, ending, or the engine has failed"}}
_JSON = {"application/json": {"schema": {"type": "object"}}}
_STREAM: dict[str, Any] = {"text/event-stream": {}}


def _gives(content: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": "Answered", "content": content}}


def _documented(kind: type[Body], gives: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body in the schema; it is read by hand, so that its errors are our own."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    responses = {**_gives(_JSON if gives is None else gives), **_REFUSED}
    return {"responses": responses, "openapi_extra": {"requestBody": {"required": True, "content": content}}}
