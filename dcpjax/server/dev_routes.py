"""Routes for who runs the server: forgetting cached content, and what it is made of and does."""

import json
from typing import Any

from starlette.requests import Request

import dcpjax
from dcpjax.server.errors import ApiError
from dcpjax.server.service import Served, ServerOptions

_FLAG = "reset_running_requests"
RESET_QUERY = [{"name": _FLAG, "in": "query", "required": False, "schema": {"type": "boolean"}}]


async def reset(request: Request, served: Served) -> None:
    """`POST /reset_prefix_cache`: forget all cached content, as before a measurement. Running requests go on, and what
    they have is for nobody else; `?reset_running_requests=true` sends them back to the queue first.

    Raises `ApiError` (400) for another value.
    """
    value = request.query_params.get(_FLAG, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError(400, f"{_FLAG}: got {value!r:.200}, it must be true or false", _FLAG)
    await served.thread.reset_prefix_cache(running=value in ("true", "1"))


def info(served: Served, options: ServerOptions) -> dict[str, Any]:
    """`GET /server_info`: the resolved configuration, what the engine is made of, and its steps of the last minute."""
    stats, pool = served.llm.engine.stats, served.llm.engine.scheduler.pool
    return {
        "version": dcpjax.__version__,
        "model": served.names[0],
        "served_model_names": list(served.names),
        "max_model_len": served.llm.max_model_len,
        "system_fingerprint": served.system_fingerprint,
        "arguments": json.loads(options.fingerprint or "{}"),
        "tensor_parallel_size": options.parallelism[0],
        "decode_context_parallel_size": options.parallelism[1],
        "description": served.llm.describe(),
        "num_blocks": pool.capacity,
        "num_free_blocks": pool.num_free,
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": served.watch.timings(),
    }
