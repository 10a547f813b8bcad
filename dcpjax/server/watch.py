"""What the log hears of a running engine: a line every few busy seconds, and a warning when drafts stop being accepted."""

import collections
import logging
import time
from collections.abc import Callable

from dcpjax.host.report import EngineStats, Moment, report
from dcpjax.host.speculation import AcceptanceAlarm

# Of which timings are kept.
_MOST_STEPS = 10_000

log = logging.getLogger("dcpjax.server")


class Watch:
    """Told of every step, in the engine thread. on_step: told how many seconds each took. period: busy seconds between lines.
    pin: the acceptance length that is forced, None: none is.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        on_step: Callable[[float], None] = lambda seconds: None,
        pin: float | None = None,
        period: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stats = stats
        self._on_step = on_step
        self._pin = pin
        self._period = period
        self._clock = clock
        self._busy = 0.0
        self._steps: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MOST_STEPS)
        self._last = self._moment()
        most = len(stats().acceptance.verified)
        self._alarm = AcceptanceAlarm(most) if most else None

    def step(self, run: Callable[[], None]) -> None:
        """Runs one step of the engine. Only such time counts as busy: rates are not thinned by idling."""
        start = self._clock()
        run()
        now = self._clock()
        self._busy += now - start
        self._steps.append((now, now - start))
        self._on_step(now - start)
        if self._busy - self._last.seconds < self._period:
            return
        before, self._last = self._last, self._moment()
        log.info(report(before, self._last, self._pin))
        if self._alarm is not None:
            warning = self._alarm.take(self._last.acceptance - before.acceptance)
            if warning is not None:
                log.warning(warning)

    def timings(self) -> dict[str, float | int]:
        """Steps of the last minute: how many, and their milliseconds. May be asked from another thread."""
        since = self._clock() - 60
        seconds = sorted(took for end, took in tuple(self._steps) if end >= since)
        if not seconds:
            return {"count": 0}
        at = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}
        places = {name: seconds[min(int(share * len(seconds)), len(seconds) - 1)] * 1e3 for name, share in at.items()}
        return {"count": len(seconds), "mean_ms": sum(seconds) / len(seconds) * 1e3, **places}

    def _moment(self) -> Moment:
        stats = self._stats()
        return Moment(
            seconds=self._busy,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            running=stats.running,
            waiting=stats.waiting,
            page_usage=stats.page_usage,
            hit_rate=stats.prefix.hit_rate if stats.prefix.counts.queries else None,
            acceptance=stats.acceptance if stats.acceptance.verified else None,
        )
