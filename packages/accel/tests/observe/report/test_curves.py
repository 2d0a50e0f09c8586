"""Axes and long curves."""

import math
import re

import pytest

from accel.observe.report.curves import draw, number, ticks, without_most_points


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.0013, 0.1, [0, 0.02, 0.04, 0.06, 0.08, 0.1]),
        (-3, 3, [-4, -2, 0, 2, 4]),
        (1e-6, 9e-6, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        (99_990, 100_010, [99_990, 99_995, 100_000, 100_005, 100_010]),
        (5, 5, [5, 6]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_are_short():
    values = [0.0, 12.0, 12345.0, 0.123456, 1e-9, 2.5e9, math.nan, -math.inf]
    assert [number(value) for value in values] == [
        *("0", "12", "12,345", "0.1235", "1e-09", "2.5e+09", "nan", "-inf")
    ]


def test_a_long_curve_keeps_its_extremes_and_gaps():
    points = [(float(step), math.sin(step / 900)) for step in range(20_000)]
    points[7777] = (7777.0, 50.0)
    points[13_131] = (13_131.0, -60.0)
    points[15_000] = (15_000.0, math.nan)
    kept = without_most_points(points, buckets=100)
    assert len(kept) <= 500
    assert {points[0], points[-1], points[7777], points[13_131]} <= set(kept)
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert without_most_points(points[:300], buckets=100) == points[:300]


def test_a_run_that_was_started_again_begins_a_line():
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (1.0, 2.5), (2.0, 3.5)]
    lines = re.findall(r'<polyline class="c4" points="([^"]*)"', draw("loss", [(4, points)]))
    assert [len(line.split()) for line in lines] == [3, 2]


def test_points_are_where_the_axes_say():
    svg = draw("loss", [(0, [(0.0, 0.0), (50.0, 5.0), (100.0, 10.0)])])
    (line,) = re.findall(r'points="([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = [[float(part) for part in pair.split(",")] for pair in line.split()]
    assert (x0 + x2) / 2 == pytest.approx(x1)
    assert (y0 + y2) / 2 == pytest.approx(y1)
    labels = dict(re.findall(r'<text x="55" y="([\d.]+)" text-anchor="end">([\d,.]+)</text>', svg))
    assert labels[f"{y0 + 4:.1f}"] == "0"
    assert labels[f"{y2 + 4:.1f}"] == "10"


@pytest.mark.parametrize(
    "points", [[(3.0, math.nan)], [(3.0, 2.0)], [(3.0, 2.0), (4.0, 2.0)], [(0.0, 0.0)], [(1e17, 2.0)]]
)
def test_short_and_level_curves_are_drawn(points):
    svg = draw("<loss>", [(0, points)])
    assert 'aria-label="&lt;loss&gt;"' in svg
    assert "nan" not in svg.replace("nan at step", "")
