"""The comparison of cache kinds: what it asks, and that its shares are of the right things."""

import numpy as np
import pytest

from dcpjax.bench import records

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_a_row_for_every_kind_and_length():
    rows = list(records.measure([192], 4, 1, kinds=("float32", "fp8")))
    assert [row["kind"] for row in rows] == ["float32", "fp8"]
    full, packed = rows
    assert full["overlap"] == 1.0 and full["right"] >= 0.75
    assert 0.8 < packed["overlap"] < 1.0
    assert packed["right"] >= full["right"] - 0.25
    assert all(row["drafts_a_row"] > 0.5 for row in rows)


def test_overlap_leaves_out_what_is_not_selected():
    first = {0: np.array([[0, -1, -1], [0, 2, 5]])}
    second = {0: np.array([[0, -1, -1], [1, 2, 4]])}
    assert records._overlap(first, first) == 1.0
    assert records._overlap(first, second) == pytest.approx((1 + 1 / 3) / 2)
