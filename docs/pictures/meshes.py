"""Draws how processes are arranged under the engines, from the meshes that accel makes."""

from __future__ import annotations

from typing import Any

from pictures.svg import COLORS, WIDTH, picture, rect, text

__all__ = ["copies", "draw"]

CELL, ROW = 40, 84


def copies(processes: list[dict[str, Any]]) -> list[list[int]]:
    """Return the ranks that have the shards of one copy of the model."""
    found: dict[Any, list[int]] = {}
    for rank, process in enumerate(processes):
        mesh = process["mesh"]
        found.setdefault(mesh.get("dp_replicate", 0) if mesh else rank, []).append(rank)
    return list(found.values())


def draw(settings: dict[str, list[dict[str, Any]]]) -> str:
    """Return a row of processes for each setting: a frame for a copy, a colour for a shard of the data."""
    parts, top = [], 0.0
    for name, processes in settings.items():
        across = (WIDTH - 8) / len(processes)
        parts.append(text(4, top + 14, name, "start", 'font-weight="bold"'))
        shares = processes[0]["shares"]
        groups = copies(processes)
        kinds = "1 copy" if len(groups) == 1 else f"{len(groups)} copies"
        parts.append(text(WIDTH - 4, top + 14, f"{kinds}, data in {shares}", "end"))
        for ranks in groups:
            left, width = 4 + ranks[0] * across + 1, len(ranks) * across - 2
            frame = 'class="copy" stroke="currentColor" stroke-opacity="0.6" rx="8"'
            parts.append(rect(left, top + 22, width, CELL + 12, "none", frame))
        for rank, process in enumerate(processes):
            left = 4 + rank * across + (across - CELL) / 2
            color = COLORS[process["share"] % len(COLORS)]
            parts.append(rect(left, top + 28, CELL, CELL, color, 'class="process" rx="5"'))
            place = _part(process["mesh"])
            base = top + (46 if place else 52)
            parts.append(text(left + CELL / 2, base, str(rank), "middle", 'class="inside"'))
            parts.append(text(left + CELL / 2, top + 61, place, "middle", 'class="inside" font-size="11"'))
        top += ROW
    return picture("How eight processes are arranged", top, parts)


def _part(mesh: dict[str, int]) -> str:
    """The place in the axes that split the model or the sequence, if there are any."""
    return next((f"{axis} {mesh[axis]}" for axis in ("tp", "cp") if axis in mesh), "")
