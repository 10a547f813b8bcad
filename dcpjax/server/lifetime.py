"""From the first listening socket to the last answer: start, signals, draining, and the exit code.

The socket is open while the model loads (`/health` says 503 until it is ready) and while the server drains. The first
signal drains and ends with 0; the second one ends at once.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import uvicorn

from dcpjax.errors import ConfigError
from dcpjax.server.app import make_app
from dcpjax.server.connection import Connection
from dcpjax.server.engine_client import EngineClient, LoadError
from dcpjax.server.engine_process import EngineProcess, flush
from dcpjax.server.engine_side import Channel, settle_memory, work
from dcpjax.server.service import Phase, Service

if TYPE_CHECKING:
    from dcpjax.llm import LLM

log = logging.getLogger("dcpjax.server")

# After the drain, for last chunks to reach their clients; a client that does not read is cut off then.
_LAST_CHUNKS_SECONDS = 2.0

_MAX_HEADER_BYTES = 64 << 10


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


def serve(
    service: Service,
    load: Callable[[], "LLM"],
    listen: Listen,
    start: Callable[[Callable[[Channel], int]], EngineProcess] = EngineProcess,
) -> int:
    """Listens, loads and serves until a signal or the engine's death; returns the exit code.

    `load` runs in the process that `start` makes, and returns a model that is ready to use. Raises `ConfigError` if the
    address is taken.
    """
    _check_certificate(listen)
    # Before all else: it is a fork.
    with start(lambda channel: work(load, service.options, channel)) as process:
        listener = _listen(listen)
        config = uvicorn.Config(
            make_app(service),
            http=Connection,
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody asks where a request came from
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
            return runner.run(_Lifetime(service, process, listener, config, listen).run())


class _Lifetime:
    def __init__(
        self,
        service: Service,
        process: EngineProcess,
        listener: socket.socket,
        config: uvicorn.Config,
        listen: Listen,
    ):
        self._service = service
        self._process = process
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
        engine = EngineClient(self._process, self._service.options.ticket_limits, self._died)
        code = await self._open(engine, start)
        if code == 0:
            await self._end.wait()
            code = await self._close()
        self._server.should_exit = True
        await serving
        if not await engine.close(seconds=10):
            log.warning("the engine is still in a step; ending all the same")
        return code

    async def _open(self, engine: EngineClient, start: float) -> int:
        """Waits for the model and says so; not 0 if it cannot be loaded."""
        try:
            model = await engine.loaded()
        except LoadError as error:
            if str(error):
                print(f"dcpjax.serve: error: {error}", file=sys.stderr, flush=True)
            return error.code
        settle_memory()
        self._service.open(model, engine)
        name, seconds = self._service.served.name, time.monotonic() - start
        with contextlib.suppress(OSError):  # nobody reads it
            print(f"Ready: {self._address()} (model {name}, {seconds:.1f} s)", flush=True)
        return 0

    def _died(self) -> None:
        self._service.die()
        self._end.set()

    def _address(self) -> str:
        listen = self._listen
        if listen.uds is not None:
            return f"unix:{listen.uds}"
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        scheme = "http" if listen.certfile is None else "https"
        return f"{scheme}://{host}:{self._listener.getsockname()[1]}"

    async def _close(self) -> int:
        """Lets running requests end, then aborts them; 1 if the engine has died."""
        service, engine = self._service, self._service.served.engine
        if service.phase is not Phase.DEAD:
            service.drain()
            log.info("draining %d requests", service.num_inflight)
            await self._quiet(self._listen.shutdown_timeout)  # the engine may die meanwhile: that ends its requests too
            engine.abort_all()
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
            self._exit(128 + number)
        if self._service.phase is Phase.LOADING:
            self._exit(0)  # nobody is being served, and a compilation cannot be interrupted
        self._service.drain()
        self._end.set()

    def _exit(self, code: int) -> NoReturn:
        """Ends both processes now, whatever they do."""
        self._process.kill()
        flush()
        os._exit(code)


def _check_certificate(listen: Listen) -> None:
    if listen.certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listen.certfile, listen.keyfile)
    except OSError as error:  # so are the library's own
        raise ConfigError(
            f"--ssl-certfile {listen.certfile} and --ssl-keyfile {listen.keyfile} cannot be used: {error.strerror or error}; "
            "give a certificate in PEM and its key"
        ) from None


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
            f"cannot listen on {place}: {error.strerror or error}; choose another --host, --port or --uds"
        ) from None


def _listen_unix(path: str) -> socket.socket:
    file = pathlib.Path(path)
    if file.exists() and stat.S_ISSOCK(file.stat().st_mode):
        file.unlink()  # of a server that has ended; one that runs loses its name to us
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(2048)
    return listener
