"""Draws the memory that training takes on each device under the engines, by accel's formulas."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

from accel.estimate.mesh import MeshSizes, mesh_bytes
from pictures.svg import COLORS, WIDTH, picture, rect, text

__all__ = ["KINDS", "SETTINGS", "draw", "needed"]

SETTINGS = {
    "1 process": MeshSizes(),
    "ddp, 8 processes": MeshSizes(dp_replicate=8),
    "fsdp2 with 2 replicas of 4 shards (HSDP)": MeshSizes(dp_replicate=2, dp_shard=4),
    "fsdp2, 8 processes": MeshSizes(dp_shard=8),
    "fsdp2 x tp, 4 shards x 2": MeshSizes(dp_shard=4, tp=2),
    "tp, 8 processes": MeshSizes(tp=8),
}
KINDS = ("parameters", "gradients", "states of Adam", "gathered, or in buckets")
LEFT, BAR, ROW = 4, 16, 42


def needed() -> dict[str, list[float]]:
    """Return the bytes on the process that has the most, of each kind, for the sizes of Llama 2 7B."""
    with contextlib.redirect_stdout(io.StringIO()):  # the table of scale.md
        names = runpy.run_path(str(Path(__file__).parents[1] / "scale_table.py"))
    shapes, split = names["language_model"](**names["MODELS"]["7B"])
    found = {}
    for name, mesh in SETTINGS.items():
        each = mesh_bytes(shapes, split, mesh)
        found[name] = [each.parameters, each.gradients, each.states, each.gathered + each.buckets]
    return found


def draw(found: dict[str, list[float]]) -> str:
    """Return a bar for each setting."""
    scale = (WIDTH - 80) / max(map(sum, found.values()))
    parts, left = [], float(LEFT)
    for place, kind in enumerate(KINDS):
        parts.append(rect(left, 4, 11, 11, COLORS[place], 'rx="2"'))
        parts.append(text(left + 15, 14, kind, "start", 'font-size="11"'))
        left += 30 + 5.7 * len(kind)
    for row, (name, sizes) in enumerate(found.items()):
        top = 26 + row * ROW
        parts.append(text(LEFT, top + 12, name))
        left = float(LEFT)
        for place, size in enumerate(sizes):
            parts.append(rect(left, top + 17, size * scale, BAR, COLORS[place], 'class="memory"'))
            left += size * scale
        parts.append(text(left + 6, top + 17 + 12.5, f"{sum(sizes) / 1e9:.0f} GB"))
    return picture("Memory on each device", 26 + len(found) * ROW, parts)
