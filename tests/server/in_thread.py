"""The engine's process as a thread of this one, for tests that look into it or must not fork."""

import socket
import threading
from collections.abc import Callable
from typing import Self

from dcpjax.server.engine_process import Pipe
from dcpjax.server.engine_side import Channel


class InThread:
    """Made, used and left as `EngineProcess` is."""

    def __init__(self, work: Callable[[Channel], int]):
        self.end, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=work, args=(Pipe(self._theirs, gone=lambda: None),))
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def fate(self) -> str:
        return "the thread ended"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        assert self.ended(10)
        self._theirs.close()
