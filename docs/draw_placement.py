"""Draws where the layers of a model went, for big-models.md: one bar for each device, to scale.

What is drawn is the device map that accel computes for docs/placed_model.py while the site is built. mkdocs
runs this as a hook; the picture exists only in the site.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from accel import infer_auto_device_map, init_empty_weights
from accel.big_models.placement.layers import make_layout
from accel.big_models.placement.memory import get_max_memory, make_targets
from accel.big_models.placement.plan import make_plan

__all__ = ["Bar", "Cell", "bars", "draw", "on_files"]

WIDTH, LEFT, TOP, BAR, LINE = 860, 84, 12, 40, 78  # pixels
KEPT = "kept free: on the device an offloaded layer runs, and on the CPU one of the disk is read"
COLORS = {0: "#9ecae9", 1: "#ffbf79", "cpu": "#a1d99b", "disk": "#d4a6c8"}
# The picture has its own background, as the page around it may be light where the reader's system is dark.
STYLE = """
.ground{fill:#fff;stroke:#ccc} .say{fill:#222} .room{fill:none;stroke:#777} .kept{fill:url(#kept);stroke:#777}
.line{stroke:#777} .in{fill:#111}
@media (prefers-color-scheme: dark){
.ground{fill:#1e2227;stroke:#444} .say{fill:#ddd} .room,.kept{stroke:#999} .line{stroke:#999}}
"""


class Cell(NamedTuple):
    """A layer on a device: its name, its bytes there, and the layer there that it shares them with."""

    layer: str
    size: int
    tied_to: str | None


class Bar(NamedTuple):
    """A device: its key in the map, its bytes if they are limited, those kept free, and its layers."""

    device: int | str
    capacity: int | None
    kept: int
    cells: list[Cell]


def bars(
    model: nn.Module, max_memory: Mapping[int | str, int | str], no_split_module_classes: list[str]
) -> list[Bar]:
    """Return what accel puts on each device."""
    device_map = infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
    memory = get_max_memory(max_memory)
    plan = make_plan(make_layout(model, no_split_module_classes), make_targets(memory))
    kept = {next(iter(device_map.values())): plan.reserved, "cpu": plan.reserved_on_cpu}
    holders: dict[tuple[int | str, int], str] = {}
    found: dict[int | str, list[Cell]] = {device: [] for device in [*memory, "disk"]}
    for layer, device in device_map.items():
        size, tied_to = 0, None
        for tensor in model.get_submodule(layer).state_dict(keep_vars=True).values():
            holder = holders.setdefault((device, id(tensor)), layer)
            if holder == layer:
                size += tensor.nbytes
            else:
                tied_to = holder
        found[device].append(Cell(layer, size, tied_to))
    limits = {device: int(size) for device, size in memory.items()}
    return [
        Bar(device, limits.get(device), int(kept.get(device, 0)), cells) for device, cells in found.items()
    ]


def draw(found: list[Bar]) -> str:
    """Return an SVG: a bar for each device, with its layers, what is kept free, and what is left."""
    longest = max(bar.capacity or sum(cell.size for cell in bar.cells) for bar in found)
    scale = (WIDTH - LEFT - 24) / longest
    rows = "".join(_row(bar, TOP + place * LINE, scale) for place, bar in enumerate(found))
    height = TOP + len(found) * LINE + 22
    legend = (
        f'<rect class="kept" x="{LEFT}" y="{height - 26}" width="26" height="14"/>'
        f"{_text(LEFT + 34, height - 15, KEPT, 'say')}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="sans-serif" font-size="12">'
        f"<title>Where the layers of a model went</title><style>{STYLE}</style>"
        '<defs><pattern id="kept" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path d="M0,6 L6,0" stroke="#888"/></pattern></defs>'
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        f"{rows}{legend}</svg>\n"
    )


def _row(bar: Bar, top: int, scale: float) -> str:
    name = f"device {bar.device}" if isinstance(bar.device, int) else bar.device
    limit = "no limit" if bar.capacity is None else _size(bar.capacity)
    parts = [
        _text(LEFT - 10, top + 17, name, "say", "end", 'font-weight="bold"'),
        _text(LEFT - 10, top + 33, limit, "say", "end", 'font-size="11"'),
    ]
    left, notes = float(LEFT), []
    for cell in bar.cells:
        width = cell.size * scale
        label = f"{cell.layer} {_size(cell.size)}"
        parts.append(
            f'<g class="layer"><title>{escape(f"{cell.layer}: {cell.size} bytes on {bar.device}")}</title>'
            f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" '
            f'fill="{COLORS[bar.device]}" stroke="#fff"/>'
        )
        if cell.tied_to is not None:
            notes.append((_left_of(bar, cell.tied_to, scale), f"= {cell.layer} (tied, counted once)"))
        elif width > 7 * max(len(cell.layer), len(_size(cell.size))):
            middle = left + width / 2
            parts.append(_text(middle, top + 17, cell.layer, "in", "middle"))
            parts.append(_text(middle, top + 32, _size(cell.size), "in", "middle", 'font-size="11"'))
        else:
            notes.append((left + width / 2, label))
        parts.append("</g>")
        left += width
    if bar.kept:
        parts.append(
            f'<rect class="kept" x="{left:.2f}" y="{top}" width="{bar.kept * scale:.2f}" height="{BAR}"/>'
        )
    if bar.capacity is not None:
        width = bar.capacity * scale
        parts.append(f'<rect class="room" x="{LEFT}" y="{top}" width="{width:.2f}" height="{BAR}"/>')
    begin, down = float(WIDTH), 0
    for place, note in sorted(notes, reverse=True):
        down = down + 14 if place + 6 * len(note) > begin else 0  # below the next note, if it reaches that
        begin = place
        base = top + BAR + down
        parts.append(
            f'<line class="line" x1="{place:.1f}" y1="{top + BAR}" x2="{place:.1f}" y2="{base + 8}"/>'
            + _text(place + 5, base + 14, note, "say", "start", 'font-size="11"')
        )
    return f'<g id="on-{bar.device}">{"".join(parts)}</g>'


def _left_of(bar: Bar, layer: str, scale: float) -> float:
    """Where the cell of a layer is marked."""
    before = 0
    for cell in bar.cells:
        if cell.layer == layer:
            return LEFT + (before + cell.size / 2) * scale
        before += cell.size
    raise ValueError(f"{layer} is not on {bar.device}.")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} KB"


def _text(left: float, base: float, text: str, kind: str, anchor: str = "start", more: str = "") -> str:
    return (
        f'<text class="{kind}" x="{left:.1f}" y="{base}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
    )


def picture() -> str:
    """Draw docs/placed_model.py."""
    names = runpy.run_path(str(Path(__file__).with_name("placed_model.py")))
    with init_empty_weights():
        model = names["GPT"]()
    return draw(bars(model, names["MAX_MEMORY"], ["Block"]))


def on_files(files: Any, *, config: Any) -> Any:
    """Add the picture to the files of the site."""
    from mkdocs.structure.files import File  # the tests, which draw too, have no mkdocs

    files.append(File.generated(config, "img/placement.svg", content=picture()))
    return files
