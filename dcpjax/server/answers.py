"""Small things that all answers have in common."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dcpjax.server.ticket import Ticket, Update

# Characters of text that the event loop can work on without being missed.
_SHORT = 4000


async def off_loop[T](size: int, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`, in a thread if it is about so many characters that others would have to wait for it."""
    return work(*arguments) if size <= _SHORT else await asyncio.to_thread(work, *arguments)


async def whole_answer(ticket: Ticket, build: Callable[[list[Update]], dict[str, Any]]) -> Response:
    """`build(updates)` of all updates of a ticket, as JSON. Raises what the ticket raises."""
    updates = [update async for news in ticket for update in news]
    # A score is some twenty characters, and there may be scores of every token.
    size = sum(20 * (len(update.logprobs) + len(update.prompt_logprobs)) for update in updates)
    return await off_loop(size, lambda: JsonResponse(build(updates)))


class JsonResponse(Response):
    """An answer whose content is written as JSON. Raises `TypeError` for what JSON has no form for."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """`content` as UTF-8 JSON without blanks."""
        return orjson.dumps(content)


def public_id(prefix: str, wanted: str | None, request: Request) -> str:
    """The id of an answer: the client's own suffix, from the body or the X-Request-Id header, or a random one."""
    return f"{prefix}{wanted or request.scope['request_id']}"
