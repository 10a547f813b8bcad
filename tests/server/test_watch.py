"""The line every few busy seconds, and the alarm, over counters that are written down."""

import dataclasses
import logging

import pytest

from dcpjax.host.hits import HitCounts, PrefixStats
from dcpjax.host.report import EngineStats
from dcpjax.host.speculation import Acceptance
from dcpjax.server.watch import Watch

NOTHING = EngineStats(
    running=0,
    waiting=0,
    page_usage=0.0,
    steps=0,
    step_prompt_tokens=0,
    step_decode_tokens=0,
    preemptions=0,
    prompt_tokens=0,
    generated_tokens=0,
    finished={},
    acceptance=Acceptance((), ()),
    prefix=PrefixStats(),
    seconds={},
)


class Bench:
    """A watch whose steps take 4 seconds each and change the counters as told; 100 idle seconds lie between them."""

    def __init__(self, caplog, stats: EngineStats = NOTHING, **options):
        caplog.set_level(logging.INFO, "dcpjax.server")
        self.now, self.stats, self._caplog = 0.0, stats, caplog
        self.watch = Watch(lambda: self.stats, clock=lambda: self.now, **options)

    def step(self, **change) -> list[tuple[str, str]]:
        """What was logged, with its level."""
        self._caplog.clear()
        self.now += 100

        def run():
            self.now += 4
            self.stats = dataclasses.replace(self.stats, **change)

        self.watch.step(run)
        return [(record.levelname, record.getMessage()) for record in self._caplog.records]


def test_a_line_every_ten_busy_seconds(caplog):
    bench = Bench(caplog)
    assert bench.step(prompt_tokens=300) == bench.step(generated_tokens=60, running=2) == []
    line = "prompt 25.0 tokens/s, generation 10.0 tokens/s, running 2, waiting 0, cache used 0.0 %"
    assert bench.step(generated_tokens=120) == [("INFO", line)], "tokens of 12 busy seconds; idle ones do not count"
    assert bench.step() == bench.step() == []
    ((_, line),) = bench.step(generated_tokens=126)
    assert line.startswith("prompt 0.0 tokens/s, generation 0.5 tokens/s")


def test_the_hit_rate_is_shown_once_somebody_asked(caplog):
    bench = Bench(caplog, period=4.0)
    assert "prefix" not in bench.step()[0][1]
    prefix = PrefixStats(HitCounts(requests=1, queries=100, hits=25), hit_rate=0.25)
    assert bench.step(prefix=prefix)[0][1].endswith("prefix hit rate 25.0 %")


@pytest.mark.parametrize("pin", [None, 2.5])
def test_drafts_and_their_alarm(caplog, pin):
    bench = Bench(
        caplog,
        dataclasses.replace(NOTHING, acceptance=Acceptance((0, 0), (0, 0))),
        period=4.0,
        pin=pin,
    )
    ((_, line),) = bench.step(acceptance=Acceptance((400, 400), (320, 240)))
    assert "acceptance length 2.40 (of 1 to 3" in line and "by place 0.80 0.60" in line
    assert ("PINNED to 2.5" in line) == (pin is not None)
    (_, line), (level, warning) = bench.step(acceptance=Acceptance((800, 800), (400, 280)))
    assert "by place 0.20 0.10" in line, "of the new ones alone"
    assert level == "WARNING" and "draft 1 is accepted 0.20 of the time, 0.80 before; draft 2" in warning
    assert len(bench.step(acceptance=Acceptance((1200, 1200), (480, 320)))) == 1, "said already"
