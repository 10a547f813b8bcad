"""The HTTP application: every route, by who may call it."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import dcpjax
from dcpjax.server import dev_routes, errors, live, text_routes
from dcpjax.server.answers import JsonResponse
from dcpjax.server.chat import chat_completions
from dcpjax.server.completions import completions
from dcpjax.server.engine_side import EngineSide
from dcpjax.server.gate import Gate
from dcpjax.server.messages import count_tokens, messages
from dcpjax.server.messages_body import CountBody, MessagesBody
from dcpjax.server.metrics import CONTENT_TYPE
from dcpjax.server.model_cards import model_card
from dcpjax.server.protocol import (
    AbortBody,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from dcpjax.server.request_log import RequestLog
from dcpjax.server.responses import responses
from dcpjax.server.responses_body import ResponsesBody
from dcpjax.server.schema import JSON, STREAM, TEXT, UNAVAILABLE, Routes
from dcpjax.server.service import Service


def make_app(service: Service) -> ASGIApp:
    """The application that serves `service`, whatever phase it is in."""
    routes = Routes("dcpjax", dcpjax.__version__)
    _add_answers(routes, service)
    _add_models(routes, service)
    _add_state(routes, service)
    if service.options.dev_endpoints:
        _add_dev(routes, service)
    document = routes.document()

    @routes.hide("/openapi.json")
    async def get_document(request: Request) -> Response:
        prefix = request.scope.get("root_path")  # which a proxy takes away
        return JsonResponse({**document, "servers": [{"url": prefix}]} if prefix else document)

    app = Starlette(routes=routes.routes)
    errors.install(app)
    gate, options = Gate.around(app, service), service.options
    return RequestLog(gate, options.quiet_paths) if options.log_requests else gate


def _add_answers(routes: Routes, service: Service) -> None:
    options = service.options

    async def read[B: Body](request: Request, kind: type[B]) -> B:
        return await read_body(request, kind, options.max_body_bytes)

    @routes.add(["POST"], "/v1/chat/completions", JSON | STREAM, asks=ChatBody)
    async def post_chat(request: Request) -> Response:
        return await chat_completions(request, await read(request, ChatBody), service.served, options)

    @routes.add(["POST"], "/v1/completions", JSON | STREAM, asks=CompletionBody)
    async def post_completions(request: Request) -> Response:
        return await completions(request, await read(request, CompletionBody), service.served, options)

    @routes.add(["POST"], "/v1/responses", JSON | STREAM, asks=ResponsesBody)
    async def post_responses(request: Request) -> Response:
        return await responses(request, await read(request, ResponsesBody), service.served, options)

    @routes.add(["POST"], "/v1/messages", JSON | STREAM, asks=MessagesBody)
    async def post_messages(request: Request) -> Response:
        return await messages(request, await read(request, MessagesBody), service.served, options)

    @routes.add(["POST"], "/v1/messages/count_tokens", JSON, asks=CountBody)
    async def post_count_tokens(request: Request) -> Response:
        return JsonResponse(await count_tokens(await read(request, CountBody), service.served, options))

    @routes.add(["POST"], "/tokenize", JSON, asks=TokenizeBody)
    async def post_tokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.tokenize(await read(request, TokenizeBody), service.served, options))

    @routes.add(["POST"], "/detokenize", JSON, asks=DetokenizeBody)
    async def post_detokenize(request: Request) -> Response:
        return JsonResponse(await text_routes.detokenize(await read(request, DetokenizeBody), service.served))


def _add_models(routes: Routes, service: Service) -> None:
    @routes.add(["GET"], "/v1/models", JSON)
    async def get_models(request: Request) -> Response:
        served = service.served
        return JsonResponse({"object": "list", "data": [model_card(served, name) for name in served.names]})

    @routes.add(["GET"], "/v1/models/{name:path}", JSON)
    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        service.served.check_model(name)
        return JsonResponse(model_card(service.served, name))


def _add_state(routes: Routes, service: Service) -> None:
    @routes.add(["GET", "HEAD"], "/health", refuses=UNAVAILABLE)
    async def get_health(request: Request) -> Response:
        return Response(status_code=200 if service.healthy else 503)

    @routes.add(["GET", "POST"], "/ping", refuses=UNAVAILABLE)
    async def get_ping(request: Request) -> Response:
        return await get_health(request)

    @routes.add(["GET"], "/ready", refuses=UNAVAILABLE)
    async def get_ready(request: Request) -> Response:
        return Response(status_code=200 if service.healthy and not service.served.engine.full else 503)

    @routes.add(["GET"], "/version", JSON, {})
    async def get_version(request: Request) -> Response:
        return JsonResponse({"version": dcpjax.__version__})

    @routes.add(["GET"], "/load", JSON)
    async def get_load(request: Request) -> Response:
        return JsonResponse({"server_load": service.served.engine.num_tickets})

    @routes.add(["GET"], "/metrics", TEXT)
    async def get_metrics(request: Request) -> Response:
        return Response(await service.served.engine.ask_aside(rendered), headers={"Content-Type": CONTENT_TYPE})


def rendered(side: EngineSide) -> bytes:
    """To be asked of the engine process: its metrics."""
    return side.metrics.render()


def _add_dev(routes: Routes, service: Service) -> None:
    @routes.add(["POST"], "/reset_prefix_cache", query=dev_routes.RESET_QUERY)
    async def post_reset(request: Request) -> Response:
        await dev_routes.reset(request, service.served)
        return Response()

    @routes.add(["GET", "POST"], "/flush_cache", query=dev_routes.RESET_QUERY)
    async def flush(request: Request) -> Response:
        return await post_reset(request)

    @routes.add(["GET"], "/server_info", JSON)
    async def get_info(request: Request) -> Response:
        return JsonResponse(await dev_routes.info(service.served, service.options))

    @routes.hide("/")
    async def get_page(request: Request) -> Response:
        return live.page()

    @routes.hide("/live")
    async def get_live(request: Request) -> Response:
        return live.feed(request, service)

    folder = service.options.profile_dir

    @routes.add(["POST"], "/start_profile", JSON)
    async def post_start_profile(request: Request) -> Response:
        return JsonResponse({"folder": await dev_routes.start_profile(service.served, folder)})

    @routes.add(["POST"], "/stop_profile", JSON)
    async def post_stop_profile(request: Request) -> Response:
        return JsonResponse({"folder": await dev_routes.stop_profile(service.served)})

    @routes.add(["POST"], "/abort_requests", asks=AbortBody)
    async def post_abort(request: Request) -> Response:
        body = await read_body(request, AbortBody, service.options.max_body_bytes)
        service.served.engine.cut(body.request_ids)
        return Response()
