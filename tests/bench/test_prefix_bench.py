"""Times to the first token: what is hit, what is predicted, and that a hit changes no text."""

import json

import pytest

from dcpjax.bench import prefix
from dcpjax.bench.prefix import Sizes


@pytest.fixture(scope="module")
def figures(quick_compile):
    return prefix.measure(prefix.QUICK)


def test_one_row_for_each_arm(figures):
    rows = figures["rows"]
    assert [(row["dcp"], row["drafts"]) for row in rows] == [(1, 2), (4, 2)]
    assert set(figures["kept"]) == {2}
    for row in rows:
        assert row["measured"] > 0 and 0 < row["predicted"] < 7
        assert set(row["ttft_seconds"]) == {"cold", "warm", "again"}
    json.dumps(figures)


def test_hits_change_no_text(figures):
    assert figures["equal_arms"] and all(row["equal_text"] for row in figures["rows"])
    # Nothing, the shared pages, all but the last token, nothing: at every dcp size.
    assert all(row["cached_tokens"] == [0, 96, 111, 0] for row in figures["rows"])


def test_prediction_and_gain():
    times = {"cached": [0, 90, 99, 0], "equal": True, "text": [1]}
    rounds = [times | {"cold": (2.0, 2.2), "warm": w, "again": a} for w, a in ((0.4, 0.2), (0.42, 0.21), (0.3, 0.19))]
    row = prefix._row(Sizes(prompt=100, shared=90), 4, 3, rounds)
    assert row["measured"] == pytest.approx(2.1 / 0.4) and row["ratio_of_medians"] == pytest.approx(2.1 / 0.4)
    assert row["predicted"] == pytest.approx(1 / (0.1 + 0.2 / 2.1))
    assert not prefix._row(Sizes(prompt=100, shared=90), 4, 3, [times | rounds[0] | {"equal": False}])["equal_text"]


def test_the_prompt_is_ten_steps_of_whole_pages():
    sizes = Sizes()
    assert sizes.prompt == 10 * (sizes.prompt - sizes.shared)
    assert sizes.shared % sizes.block == sizes.prompt % sizes.block == 0
