"""Routes for who runs the server: forgetting cached content, what it is made of and does, profiles."""

import json
from typing import Any

from starlette.requests import Request

import dcpjax
from dcpjax.server.engine_side import EngineSide
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
    await served.engine.ask(_forget, value in ("true", "1"))


async def info(served: Served, options: ServerOptions) -> dict[str, Any]:
    """`GET /server_info`: the resolved configuration, what the engine is made of, and its steps of the last minute."""
    return {
        "version": dcpjax.__version__,
        "model": served.names[0],
        "served_model_names": list(served.names),
        "max_model_len": served.model.max_model_len,
        "system_fingerprint": served.system_fingerprint,
        "arguments": json.loads(options.fingerprint or "{}"),
        "tensor_parallel_size": options.parallelism[0],
        "decode_context_parallel_size": options.parallelism[1],
        **await served.engine.ask_aside(_state),
    }


async def start_profile(served: Served, folder: str | None) -> str:
    """`POST /start_profile`, see `Profiler.start`."""
    return await served.engine.ask_aside(_start_profile, folder)


async def stop_profile(served: Served) -> str:
    """`POST /stop_profile`, see `Profiler.stop`."""
    return await served.engine.ask_aside(_stop_profile)


# To be asked of the engine process.


def _forget(side: EngineSide, running: bool) -> None:
    side.engine.reset_prefix_cache(running)


def _state(side: EngineSide) -> dict[str, Any]:
    stats, pool = side.engine.stats, side.engine.scheduler.pool
    return {
        "description": side.llm.describe(),
        "num_blocks": pool.capacity,
        "num_free_blocks": pool.num_free,
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": side.watch.timings(),
    }


def _start_profile(side: EngineSide, folder: str | None) -> str:
    return side.profiler.start(folder)


def _stop_profile(side: EngineSide) -> str:
    return side.profiler.stop()
