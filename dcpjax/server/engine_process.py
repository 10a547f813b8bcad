"""The process that the engine has for itself, seen from the front: how it is made, heard, and how it ends.

It is forked before the front has threads or a loop, so that it begins with all that is imported already. It ends when the
front says so or is gone; the signals that end a server are the front's.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from dcpjax.server.engine_side import Channel
from dcpjax.server.wire import Unpacker, pack

log = logging.getLogger("dcpjax.server")


class EngineProcess:
    """A child that runs `work`, whose result is its exit code. A context: at its end the child is gone."""

    def __init__(self, work: Callable[[Channel], int]):
        self.end, theirs = socket.socketpair()
        flush()
        if threading.current_thread() is threading.main_thread():
            # Whoever started us may have had its children's ends ignored, and that is handed on.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._code: int | None = None  # once it has ended
        self._pid = os.fork()
        if self._pid == 0:
            self.end.close()
            _be(work, theirs)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        limit = time.monotonic() + seconds
        while self._code is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody else was told
                pid, status = self._pid, 1 << 8
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                return False
            else:
                time.sleep(0.005)
        return True

    def fate(self) -> str:
        """How it ended, in words."""
        if not self.ended(1):
            return "the engine process no longer answers"
        if self._code < 0:
            return f"the engine process was ended by signal {-self._code} ({signal.Signals(-self._code).name})"
        return f"the engine process ended with code {self._code}"

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        self.end.close()
        if not self.ended(0):
            os.kill(self._pid, signal.SIGKILL)
            self.ended(10)


def _be(work: Callable[[Channel], int], end: socket.socket) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group, and the front knows what to do
            signal.signal(number, signal.SIG_IGN)
        code = work(Pipe(end, gone=lambda: os._exit(0)))
    except BaseException:
        log.exception("the engine process failed")
    finally:
        flush()
        os._exit(code)  # without what the front has registered for its own end


def flush() -> None:
    """Both of the standard streams, if somebody still reads them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Pipe:
    """The engine process's end; a `Channel`. gone: called when the front has gone: whatever is loaded or computed here is
    nobody's any more."""

    def __init__(self, end: socket.socket, gone: Callable[[], None]):
        self._end = end
        self._gone = gone
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Waits while the front has too much to read; says nothing if it has gone, which `listen` hears of."""
        data = pack(message)
        try:
            with self._sending:
                self._end.sendall(data)
        except OSError:
            log.debug("the front has gone")

    def listen(self, hear: Callable[[Any], None]) -> None:
        """Calls `hear` with every message, until the front has gone."""
        unpacker = Unpacker()
        try:
            while data := self._end.recv(1 << 20):
                for message in unpacker.take(data):
                    hear(message)
        except OSError:
            log.debug("the front has gone")
        self._gone()
