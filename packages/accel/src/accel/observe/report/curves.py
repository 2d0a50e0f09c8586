"""Curves as SVG: axes with round numbers, gaps where a value is not finite, and extremes that stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from accel.observe.report.read import Points

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 34
_Place = Callable[[float, float], tuple[float, float]]
BUCKETS = 400
"""A curve is drawn with at most so many groups of points: one for about each pixel."""


def draw(name: str, curves: Sequence[tuple[int, Points]]) -> str:
    """Draw the curves of one value.

    Args:
        name: The value's name.
        curves: Per run, the number of its color, and its points.

    Returns:
        An SVG, whose colors are the page's.
    """
    finite = [point for _, points in curves for point in points if math.isfinite(point[1])]
    steps = [step for _, points in curves for step, _ in points]
    left, right = min(steps), max(steps)
    if left == right:  # one point, in the middle
        around = max(1.0, abs(left) / 1000)  # more than rounding
        left, right = left - around, right + around
    x_ticks, y_ticks = ticks(left, right), ticks(*_range([value for _, value in finite]))
    low, high = y_ticks[0], y_ticks[-1]

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        up = (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        # SVG counts down from the top.
        return LEFT + across, HEIGHT - BOTTOM - up

    elements = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}"><g class="axes">',
    ]
    for value in y_ticks:
        _, down = place(left, value)
        elements.append(f'<line x1="{LEFT}" y1="{down:.1f}" x2="{WIDTH - RIGHT}" y2="{down:.1f}"/>')
        elements.append(f'<text x="{LEFT - 7}" y="{down + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for step in x_ticks:
        if left <= step <= right:
            across, _ = place(step, low)
            base = HEIGHT - BOTTOM
            elements.append(f'<line x1="{across:.1f}" y1="{base}" x2="{across:.1f}" y2="{base + 4}"/>')
            elements.append(
                f'<text x="{across:.1f}" y="{base + 17}" text-anchor="middle">{number(step)}</text>'
            )
    elements.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text></g>')
    for color, points in curves:
        elements += _curve(color, without_most_points(points), place)
    return "".join(elements) + "</svg>"


def _curve(color: int, points: Points, place: _Place) -> Iterator[str]:
    for pieces in _pieces(points):
        placed = [place(*point) for point in pieces]
        if len(placed) == 1:
            yield f'<circle class="c{color}" cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="2.5"/>'
        else:
            line = " ".join(f"{across:.1f},{down:.1f}" for across, down in placed)
            yield f'<polyline class="c{color}" points="{line}"/>'
    for step, value in points:
        if not math.isfinite(value):
            across, down = place(step, 0)[0], HEIGHT - BOTTOM
            tooltip = f"{value} at step {number(step)}"
            cross = f"M{across - 3:.1f},{down - 7}l6,6m0,-6l-6,6"
            yield f'<path class="gap" d="{cross}"><title>{tooltip}</title></path>'


def _pieces(points: Points) -> Iterator[Points]:
    """Cut where a value is not finite, and where the steps begin again: a run that was started again."""
    piece: Points = []
    for step, value in points:
        if piece and (not math.isfinite(value) or step < piece[-1][0]):
            yield piece
            piece = []
        if math.isfinite(value):
            piece.append((step, value))
    if piece:
        yield piece


def without_most_points(points: Points, buckets: int = BUCKETS) -> Points:
    """Leave out points of a long curve, but of each group of neighbours the lowest and the highest stay.

    Args:
        points: The points.
        buckets: The number of groups.

    Returns:
        The first, lowest, highest and last point of each group, and one that is not finite if it has any.
    """
    # Each group keeps four points or five: nothing would be left out.
    if len(points) <= 4 * buckets:
        return points
    kept: Points = []
    for number_of in range(buckets):
        group = range(number_of * len(points) // buckets, (number_of + 1) * len(points) // buckets)
        finite = [index for index in group if math.isfinite(points[index][1])]
        gaps = [index for index in group if not math.isfinite(points[index][1])][:1]
        chosen = {group[0], group[-1], *gaps}
        if finite:
            chosen |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(chosen)]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers, the first at or below `low`, and the last at or above `high`."""
    step = (high - low) / count or 1.0
    magnitude = 10.0 ** math.floor(math.log10(step))
    # Steps that are easy to read; 1e-9 forgives what rounding has added.
    step = next(size * magnitude for size in (1, 2, 2.5, 5, 10) if size * magnitude >= step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Return a number as an axis or a table shows it, with at most five digits."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _range(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    around = abs(low) / 10 or 1.0  # a curve that is level
    return low - around, high + around
