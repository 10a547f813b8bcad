"""What the log hears of a running engine: a line every few busy seconds, and a warning when drafts stop being accepted."""

import logging
import time
from collections.abc import Callable

from dcpjax.engine import EngineStats
from dcpjax.host.report import Moment, report
from dcpjax.host.speculation import AcceptanceAlarm

log = logging.getLogger("dcpjax.server")


class Watch:
    """Told of every step, in the engine thread. stats: asked when a line is due. period: busy seconds between lines.
    pin: the acceptance length that is forced, None: none is.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        *,
        pin: float | None = None,
        period: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stats = stats
        self._pin = pin
        self._period = period
        self._clock = clock
        self._busy = 0.0
        self._last = self._moment()
        most = len(stats().acceptance.verified)
        self._alarm = AcceptanceAlarm(most) if most else None

    def step(self, run: Callable[[], None]) -> None:
        """Runs one step of the engine. Only such time counts as busy: rates are not thinned by idling."""
        start = self._clock()
        run()
        self._busy += self._clock() - start
        if self._busy - self._last.seconds < self._period:
            return
        before, self._last = self._last, self._moment()
        log.info(report(before, self._last, self._pin))
        if self._alarm is not None:
            warning = self._alarm.take(self._last.acceptance - before.acceptance)
            if warning is not None:
                log.warning(warning)

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
