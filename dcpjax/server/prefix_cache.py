"""`POST /reset_prefix_cache`: forget all cached content, as after a change of weights or before a measurement."""

from starlette.requests import Request

from dcpjax.server.errors import ApiError
from dcpjax.server.service import Served

_FLAG = "reset_running_requests"


async def reset(request: Request, served: Served) -> None:
    """Raises `ApiError`: 409 while requests use the cache, unless `?reset_running_requests=true` sends them back to the
    queue first."""
    value = request.query_params.get(_FLAG, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError(400, f"{_FLAG}: got {value!r:.200}, it must be true or false", _FLAG)
    if not await served.thread.reset_prefix_cache(running=value in ("true", "1")):
        raise ApiError(
            409,
            "The prefix cache is in use by running requests, so nothing was reset: try again when they have ended, or "
            f"add ?{_FLAG}=true, which sends them back to the queue and computes them anew.",
        )
