"""Small things that all answers have in common."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def public_id(prefix: str, wanted: str | None, request: Request) -> str:
    """The id of an answer: the client's own suffix, from the body or the X-Request-Id header, or a random one."""
    return f"{prefix}{wanted or request.scope['request_id']}"
