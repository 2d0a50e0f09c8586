"""Draws the accumulation window, from a run on two processes."""

from __future__ import annotations

from typing import Any

from pictures.svg import COLORS, WIDTH, line, picture, rect, text

__all__ = ["draw"]

LEFT, ROW, BAR = 66, 84, 34


def draw(ranks: list[list[dict[str, Any]]]) -> str:
    """Return a row of bars for each process: the gradient after each micro-batch."""
    steps = len(ranks[0])
    across = (WIDTH - LEFT - 6) / steps
    largest = max(row["gradient"] for rows in ranks for row in rows)
    bottom = 24 + len(ranks) * ROW
    parts, start = [], 0
    for number, row in enumerate(ranks[0]):
        parts.append(text(LEFT + (number + 0.5) * across, 12, str(number + 1), "middle"))
        if row["ends"]:
            left = LEFT + start * across + 2
            width = (number + 1 - start) * across - 4
            outline = 'stroke="currentColor" stroke-opacity="0.4" stroke-dasharray="4 3" rx="6"'
            parts.append(rect(left, 18, width, bottom - 14, "none", outline))
            parts.append(text(left + width - 4, bottom + 16, "average, step", "end"))
            start = number + 1
    parts.append(text(0, 12, "micro-batch"))
    for rank, rows in enumerate(ranks):
        base = 24 + (rank + 1) * ROW - 8
        parts.append(text(0, base - 8, f"process {rank}"))
        parts.append(line(LEFT + 4, base, WIDTH - 8, base, 'stroke="currentColor" stroke-opacity="0.3"'))
        for number, row in enumerate(rows):
            height = row["gradient"] / largest * (ROW - 30)
            left = LEFT + (number + 0.5) * across - BAR / 2
            more = 'class="gradient" rx="3"' + (
                ' stroke="currentColor" stroke-width="2"' if row["ends"] else ""
            )
            parts.append(rect(left, base - height, BAR, height, COLORS[rank], more))
            parts.append(text(left + BAR / 2, base - height - 4, f"{row['gradient']:g}", "middle"))
    return picture("The accumulation window: gradients of two processes", bottom + 24, parts)
