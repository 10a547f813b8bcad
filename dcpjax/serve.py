"""`python -m dcpjax.serve`: the command that puts a model, an engine and a server together.

The only module that reads environment variables.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.errors import ConfigError
from dcpjax.server.arguments import parse
from dcpjax.server.echo import EchoLLM
from dcpjax.server.engine_process import EngineProcess
from dcpjax.server.engine_side import Channel
from dcpjax.server.lifetime import serve
from dcpjax.server.service import Service

if TYPE_CHECKING:
    from dcpjax.llm import LLM

log = logging.getLogger("dcpjax.serve")


def main(
    argv: Sequence[str] | None = None,
    *,
    make_llm: Callable[[dict[str, Any]], "LLM"] | None = None,
    environment: Mapping[str, str] = os.environ,
    start: Callable[[Callable[[Channel], int]], EngineProcess] = EngineProcess,
) -> int:
    """Serves until a signal; returns the exit code. `make_llm`: makes the model from the arguments of `LLM`, instead of
    the engine that the line names. `start`: makes the engine's process, see `lifetime.serve`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end
    # In either process no thread must wait five milliseconds for the interpreter.
    sys.setswitchinterval(0.0005)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)  # else it tells of every platform that is not there
    keys = [environment[name] for name in ("DCPJAX_API_KEY", "VLLM_API_KEY") if environment.get(name)]
    settings = parse(
        sys.argv[1:] if argv is None else argv,
        api_keys=keys[:1],
        draft_kv=_draft_kv(environment),
        debug=_debug(environment),
    )
    for line in settings.warnings:
        log.warning(line)
    make = make_llm or {"jax": _make_llm, "echo": EchoLLM}[settings.engine]
    try:
        return serve(Service(settings.options), lambda: make(settings.llm), settings.listen, start)
    except ConfigError as error:
        print(f"dcpjax.serve: error: {error}", file=sys.stderr)
        return 2


def _make_llm(arguments: dict[str, Any]) -> "LLM":
    """Loads the model and compiles every shape."""
    import jax

    size = arguments["tensor_parallel_size"] or arguments["decode_context_parallel_size"]
    # Before anything asks JAX for its devices; it counts on CPU only.
    jax.config.update("jax_num_cpu_devices", size)
    from dcpjax.llm import LLM

    llm = LLM(**arguments)
    for line in llm.describe():
        log.info(line)
    _warm_up(llm)
    return llm


def _warm_up(llm: "LLM") -> None:
    """Compiles every shape; a bar on a terminal, else a line for each."""
    if not sys.stderr.isatty():
        llm.warm_up(lambda done, total: log.info("compiled %d of %d shapes", done, total))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("compiling", BarColumn(), MofNCompleteColumn(), "shapes", TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=None)
        llm.warm_up(lambda done, total: bar.update(task, completed=done, total=total))


def _debug(environment: Mapping[str, str]) -> bool:
    value = environment.get("VLLM_DCP_DEBUG")
    if value is None:
        return False
    debug = value not in ("", "0")
    log.info("VLLM_DCP_DEBUG=%s: --%sdcp-debug unless the command line says otherwise", value, "" if debug else "no-")
    return debug


def _draft_kv(environment: Mapping[str, str]) -> str | None:
    value = environment.get("VLLM_DCP_SHARD_DRAFT")
    if value is None:
        return None
    draft_kv = "replicated" if value in ("", "0") else "sharded"
    log.info("VLLM_DCP_SHARD_DRAFT=%s: draft_kv is %s unless --speculative-config says otherwise", value, draft_kv)
    return draft_kv


if __name__ == "__main__":
    sys.exit(main())
