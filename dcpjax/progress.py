"""How far the weights are: a bar with bytes a second on a terminal, lines in the log elsewhere."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

log = logging.getLogger("dcpjax")

_SECONDS_A_LINE = 10.0

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def loading(stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Yields what is to be called with (bytes done, bytes in all). The log gets a line at the end in any case."""
    counted = _Counted(clock)
    with _bar(stream) if stream.isatty() else contextlib.nullcontext(_Lines(clock)) as show:

        def progress(done: int, total: int) -> None:
            counted.done = done
            show(done, total)

        yield progress
    log.info("weights: %s", counted.told())


class _Counted:
    """Bytes and seconds since the start."""

    def __init__(self, clock: Callable[[], float]):
        self.done = 0
        self._clock = clock
        self._start = clock()

    def told(self) -> str:
        seconds = self._clock() - self._start
        return f"{self.done / 1e6:,.1f} MB in {seconds:.1f} s, {self.done / max(seconds, 1e-9) / 1e6:,.0f} MB/s"


class _Lines:
    """A line in the log from time to time."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._last = self._start = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._last >= _SECONDS_A_LINE:
            self._last = now
            rate = done / (now - self._start) / 1e6
            log.info("loading weights: %.1f of %.1f GB, %s MB/s", done / 1e9, total / 1e9, f"{rate:,.0f}")


@contextlib.contextmanager
def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("loading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
