"""Draws the cost of accel and its peers, from the table of the last full benchmark."""

from __future__ import annotations

import math
from typing import NamedTuple

from pictures.svg import COLORS, WIDTH, line, picture, rect, text

__all__ = ["Row", "draw", "rows"]

PEERS = ("accel", "accelerate", "lightning-fabric")
LEAST, MOST, BAR, HEAD = 0.1, 200.0, 11, 22


class Row(NamedTuple):
    """A row of the table: what was measured, and by contestant its multiple of plain PyTorch's cost."""

    name: str
    values: dict[str, float]


def rows(page: str) -> list[Row]:
    """Return the rows in which a peer was measured too, as multiples of plain PyTorch's cost.

    Where more is better, as of tokens per second, the cost is one over the value.
    """
    table = page.partition("<!-- bench: begin -->")[2].partition("<!-- bench: end -->")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    cells = [row for row in cells if len(row) > 6]
    head = [name.strip() for name in cells[0]]
    found = []
    for row in cells[1:]:
        power = -1 if row[head.index("limit")].startswith(">=") else 1
        values = {
            peer: float(row[head.index(peer)].removesuffix(" x")) ** power
            for peer in PEERS
            if row[head.index(peer)].endswith(" x")
        }
        if "accel" in values and len(values) > 1:
            found.append(Row(row[0].replace("`", ""), values))
    return found


def _x(value: float) -> float:
    share = math.log(value / LEAST) / math.log(MOST / LEAST)
    return 4 + (WIDTH - 60) * min(max(share, 0.0), 1.0)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def draw(found: list[Row]) -> str:
    """Return bars on a logarithmic scale, which begin at plain PyTorch."""
    parts, left = [], 4.0
    for place, peer in enumerate(PEERS):
        parts.append(rect(left, 4, 11, 11, COLORS[place], 'rx="2"'))
        parts.append(text(left + 16, 14, peer))
        left += 34 + 7 * len(peer)
    top = 26.0
    for row in found:
        name = row.name.partition(":")[0]
        parts.append(text(4, top + 14, name, "start", 'font-size="11.5"'))
        top += HEAD
        first_bar = top
        for place, peer in enumerate(PEERS):
            if peer not in row.values:
                continue
            value = row.values[peer]
            first, last = sorted((_x(1.0), _x(value)))
            parts.append(rect(first, top, max(last - first, 1.5), BAR, COLORS[place], 'class="cost" rx="2"'))
            parts.append(text(max(last, _x(1.0)) + 5, top + 10, _number(value), "start", 'font-size="11"'))
            top += BAR + 2
        dashes = 'stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="3 3"'
        parts.append(line(_x(1.0), first_bar - 3, _x(1.0), top + 1, dashes))
        top += 8
    parts.append(
        text(_x(1.0), top + 13, "plain PyTorch = 1; to the left is faster", "start", 'font-size="11"')
    )
    return picture("Cost compared with the peers", top + 20, parts)
