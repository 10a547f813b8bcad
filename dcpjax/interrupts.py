"""Ctrl-C while a step may have given its buffers away: held back until nothing can be lost."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Holds Ctrl-C back while a step may have given its buffers away: an exception between the call and the assignment
    of what came back would lose the caches. The yielded list tells whether one came; it is raised at the end at the
    latest, a second one at once.
    """
    pending: list[int] = []
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield pending
        return

    def hold(number: int, frame: Any) -> None:
        if pending:
            usual(number, frame)
        pending.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, usual)
    if pending:
        raise KeyboardInterrupt
