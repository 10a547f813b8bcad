"""The line of a busy engine."""

import dataclasses

from dcpjax.host.report import Moment, report
from dcpjax.host.speculation import Acceptance

START = Moment(2.0, 100, 50, 0, 0, 0.0)
LATER = Moment(12.0, 12_445, 83, 3, 2, 0.1234)


def test_without_cache_and_drafts():
    assert report(START, LATER) == (
        "prompt 1,234.5 tokens/s, generation 3.3 tokens/s, running 3, waiting 2, cache used 12.3 %"
    )
    assert report(LATER, LATER).startswith("prompt 0.0 tokens/s"), "no time has passed"


def test_with_cache_and_drafts():
    """Acceptance is that of the time between; the hit rate has its own window."""
    before = dataclasses.replace(START, hit_rate=0.9, acceptance=Acceptance((100, 100, 0), (100, 100, 0)))
    now = dataclasses.replace(LATER, hit_rate=0.4567, acceptance=Acceptance((140, 140, 0), (130, 120, 0)))
    assert report(before, now).endswith(
        "cache used 12.3 %, prefix hit rate 45.7 %, acceptance length 2.25 (of 1 to 4), accepted by place 0.75 0.50 -"
    )
    none = report(now, now)
    assert none.endswith("acceptance length none yet (of 1 to 4), accepted by place - - -")
    first = report(START, now)
    assert "acceptance length 2.79 " in first, "all of it is new to whoever counted nothing before"


def test_a_pin_cannot_be_overlooked():
    now = dataclasses.replace(LATER, acceptance=Acceptance((10,), (5,)))
    assert "acceptance length 1.50 (of 1 to 2, PINNED to 1.5: the text is not the model's)" in report(START, now, 1.5)
