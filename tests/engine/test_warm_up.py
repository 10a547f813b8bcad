"""Shapes are compiled side by side, each before it runs, and running compiles nothing again."""

import threading

import jax
import pytest

from dcpjax.attention import AttentionOptions
from dcpjax.host.plan import StepPlan
from tests.attention import toy
from tests.attention.paged import PAGE, Geometry

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_what_was_compiled_ahead_is_what_runs(monkeypatch):
    compiles, told, during_runs = [], [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            compiles.append(threading.get_ident()) if name.endswith("backend_compile_duration") else None
        )
    )
    cfg = toy.config("F", "D")
    runner = toy.runner(cfg, Geometry(2, num_pages=16), AttentionOptions(), seqs=1, tokens=8, length=2 * PAGE)
    run = runner._run

    def watched(plan, shape):
        before = compiles.count(threading.get_ident())
        output = run(plan, shape)
        during_runs.append(compiles.count(threading.get_ident()) - before)
        return output

    monkeypatch.setattr(runner, "_run", watched)
    runner.warm_up(lambda done, total: told.append((done, total)))
    shapes = len(runner.buckets.shapes)
    assert shapes > 1 and told == [(done, shapes) for done in range(shapes + 1)]
    assert during_runs == [0] * shapes
    assert runner.num_compiled == shapes and len(compiles) >= shapes
    # Without compiling ahead, a run does compile: the listener hears it.
    jax.clear_caches()
    runner._run(StepPlan(rows=(), epoch=0), runner.buckets.shapes[0])
    assert during_runs[-1] > 0
