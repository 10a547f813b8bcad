"""From the first listening socket to the last answer: start, signals, draining, and the exit code.

The socket is open while the model loads (`/health` says 503 until it is ready) and while the server drains. The first
signal drains and ends with 0; the second one ends at once.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import pathlib
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from dcpjax.errors import ConfigError, DcpjaxError
from dcpjax.server.app import make_app
from dcpjax.server.connection import Connection
from dcpjax.server.service import Phase, Service

if TYPE_CHECKING:
    from dcpjax.llm import LLM

log = logging.getLogger("dcpjax.server")

# After the drain, for last chunks to reach their clients; a client that does not read is cut off then.
_LAST_CHUNKS_SECONDS = 2.0

_MAX_HEADER_BYTES = 64 << 10

# Between two looks for cycles; what a request leaves is freed without them.
_NEW_OBJECTS = 50_000


@dataclasses.dataclass(frozen=True)
class Listen:
    """Where to listen, and how long running requests get once a signal came (seconds). uds: a Unix socket instead of
    host and port. keyfile, certfile: for HTTPS. log_level: what the log has of connections, by uvicorn's names."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    keyfile: str | None = None
    certfile: str | None = None
    shutdown_timeout: float = 30.0
    log_level: str = "warning"


class _Server(uvicorn.Server):
    """Signals are handled here, not there: it would raise them again and end with their code."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def serve(service: Service, load: Callable[[], "LLM"], listen: Listen) -> int:
    """Listens, loads and serves until a signal or the engine's death; returns the exit code.

    `load` runs in a thread and returns a model that is ready to use. Raises `ConfigError` if the address is taken.
    """
    listener = _listen(listen)
    config = uvicorn.Config(
        make_app(service),
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        log_level=listen.log_level,
        timeout_keep_alive=75,
        server_header=False,
        root_path=listen.root_path,
        ssl_keyfile=listen.keyfile,
        ssl_certfile=listen.certfile,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_Lifetime(service, load, listener, config, listen).run())


class _Lifetime:
    def __init__(
        self,
        service: Service,
        load: Callable[[], "LLM"],
        listener: socket.socket,
        config: uvicorn.Config,
        listen: Listen,
    ):
        self._service = service
        self._load = load
        self._listener = listener
        self._server = _Server(config)
        self._listen = listen
        self._signals = 0
        self._end = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        start = time.monotonic()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        code = await self._open(loop, start)
        if code == 0:
            await self._end.wait()
            code = await self._close()
        self._server.should_exit = True
        await serving
        if not (self._service.phase is Phase.LOADING or self._service.served.thread.stop(timeout=10)):
            log.warning("the engine is still in a step; ending all the same")
            _exit(code)
        return code

    async def _open(self, loop: asyncio.AbstractEventLoop, start: float) -> int:
        """Loads the model and says so; not 0 if that fails."""
        loaded: asyncio.Future[LLM] = loop.create_future()

        def load() -> None:
            try:
                llm = self._load()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the event loop must hear of it
                loop.call_soon_threadsafe(loaded.set_exception, error)
            else:
                loop.call_soon_threadsafe(loaded.set_result, llm)

        threading.Thread(target=load, name="load", daemon=True).start()
        try:
            llm = await loaded
        except DcpjaxError as error:
            print(f"dcpjax.serve: error: {error}", file=sys.stderr, flush=True)
            return 2
        except Exception:
            log.exception("the model could not be loaded")
            return 1
        # What is loaded stays: the collector need not look through it again and again, nor as often as for a script.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)
        self._service.open(llm, self._end.set)
        name, seconds = self._service.served.name, time.monotonic() - start
        print(f"Ready: {self._address()} (model {name}, {seconds:.1f} s)", flush=True)
        return 0

    def _address(self) -> str:
        listen = self._listen
        if listen.uds is not None:
            return f"unix:{listen.uds}"
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        scheme = "http" if listen.certfile is None else "https"
        return f"{scheme}://{host}:{self._listener.getsockname()[1]}"

    async def _close(self) -> int:
        """Lets running requests end, then aborts them; 1 if the engine has died."""
        service, thread = self._service, self._service.served.thread
        if service.phase is not Phase.DEAD:
            service.drain()
            log.info("draining %d requests", service.num_inflight)
            await self._quiet(self._listen.shutdown_timeout)  # the engine may die meanwhile: that ends its requests too
            thread.abort_all()
        await self._quiet(_LAST_CHUNKS_SECONDS)
        # What is still open does not read its answer.
        self._server.config.timeout_graceful_shutdown = 1
        return 1 if service.phase is Phase.DEAD else 0

    async def _quiet(self, seconds: float) -> None:
        """Waits until nothing is being answered, at most so long."""
        end = time.monotonic() + seconds
        while self._service.num_inflight and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            _exit(128 + number)
        if self._service.phase is Phase.LOADING:
            _exit(0)  # nobody is being served, and a compilation cannot be interrupted
        self._service.drain()
        self._end.set()


def _exit(code: int) -> None:
    """Ends the process now, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _listen(listen: Listen) -> socket.socket:
    place = f"{listen.host}:{listen.port}" if listen.uds is None else listen.uds
    try:
        if listen.uds is not None:
            return _listen_unix(listen.uds)
        family, _, _, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {place}: {error.strerror}; choose another --host, --port or --uds"
        ) from None


def _listen_unix(path: str) -> socket.socket:
    file = pathlib.Path(path)
    if file.exists() and stat.S_ISSOCK(file.stat().st_mode):
        file.unlink()  # of a server that has ended; one that runs loses its name to us
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(2048)
    return listener
