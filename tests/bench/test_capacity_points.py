"""Published cache sizes: the formula of each one's own layout within two per cent, and the table that says so."""

import pathlib

import pytest

from dcpjax.bench.capacity_points import POINTS, Layout, table

PAGE = pathlib.Path(__file__).parents[2] / "docs/benchmarks.md"


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.source}-{point.published}")
def test_published_points_are_predicted(point):
    assert point.predicted == pytest.approx(point.published, rel=0.02)


def test_bytes_of_a_token():
    """By hand: 78 layers of 656 bytes, 21 of 132, and the draft's layer with both."""
    assert Layout(1).bytes_per_token() == 79 * 656 + 22 * 132 == 54_728
    assert Layout(8, 8, 8, 1).bytes_per_token() == 79 * 656 / 8 + 22 * 132
    assert Layout(4, 2, 1, 1).bytes_per_token() == 78 * 656 / 4 + 21 * 132 / 2 + 788


def test_the_page_has_the_table():
    assert "\n".join(table()) in PAGE.read_text(), "make it again: python -m dcpjax.bench capacity-points"
