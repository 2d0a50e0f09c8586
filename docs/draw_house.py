"""Draws the pictures of architecture.md from the imports: packages, folders, four paths through the code.

mkdocs runs this as a hook. The pictures and the ways exist only in the site that is built; a way whose next
module is not imported by the one before, and a module that is gone, fail the build.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from repo_checks.tree import Module, packages  # noqa: E402 - tools are no package

__all__ = ["WAYS", "Edges", "draw", "folders", "house", "on_files", "on_page_markdown", "rows", "way"]

Edges = Counter[tuple[str, str]]
"""How many modules of one place import one of another."""

WAYS = {
    "a batch": (
        "accel.accelerator",
        "accel.training.prepare",
        "accel_data.prepare",
        "accel_data.loader.shard",
        "accel_data.loader.iteration",
        "accel_data.loader.base",
        "accel_data.order.samplers",
        "accel_data.order.global_order",
    ),
    "a gradient": (
        "accel.accelerator",
        "accel.training.gradients",
        "accel.engines",
        "accel.engines.base",
        "accel_optim.optimizer",
        "accel_optim.scaler",
    ),
    "a checkpoint": (
        "accel.accelerator",
        "accel.saving.save",
        "accel_ckpt.training_state.save",
        "accel_ckpt.folder.staging",
        "accel_ckpt.folder.commit",
        "accel_ckpt.folder.manifest",
    ),
    "a weight": (
        "accel.big_modeling",
        "accel.big_models.dispatch",
        "accel.big_models.hooks.attach",
        "accel.big_models.hooks.align",
        "accel.big_models.hooks.prefetch",
        "accel_ckpt.weights.mapped",
    ),
}
"""The modules that these come through, each of which imports the next, some of them only for its types."""

WIDTH, BOX, GAP, LINE = 860, 34, 16, 86  # pixels


@cache
def _modules() -> dict[str, Module]:
    return {module.name: module for package in packages(ROOT).values() for module in package.modules}


@cache
def _imported(name: str, for_types: bool = False) -> frozenset[str]:
    """The modules of ours that a module imports, at any depth; `for_types` adds those under TYPE_CHECKING."""
    modules, imported = _modules(), set()
    for item in modules[name].imports:
        if for_types or item.when != "typing":
            targets = {item.module, *(f"{item.module}.{each}" for each in item.names)}
            imported |= {target for target in targets if target in modules}
    return frozenset(imported - {name})


def house() -> Edges:
    """Imports between packages."""
    return _edges(lambda name: name.partition(".")[0])


def folders(package: str) -> Edges:
    """Imports between the folders of a package; a module next to them stands for itself."""

    def place(name: str) -> str | None:
        top, _, rest = name.partition(".")
        return rest.partition(".")[0] or None if top == package else None

    return _edges(place)


def _edges(place: Any) -> Edges:
    edges: Edges = Counter()
    for module in _modules():
        here = place(module)
        for target in _imported(module):
            there = place(target)
            if here and there and here != there:
                edges[here, there] += 1
    return edges


def rows(edges: Edges) -> list[list[str]]:
    """Places from the top down: what nothing else imports comes first, and what imports nothing last.

    Of places that import each other, the one that imports more comes first.
    """
    left = {place for edge in edges for place in edge}
    levels: list[list[str]] = []
    while left:
        inside = {edge: count for edge, count in edges.items() if edge[0] in left and edge[1] in left}
        free = sorted(left - {target for _, target in inside})
        if not free:  # a circle
            balance = {
                place: sum(n for (a, _), n in inside.items() if a == place)
                - sum(n for (_, b), n in inside.items() if b == place)
                for place in left
            }
            free = [max(sorted(left), key=balance.__getitem__)]
        levels.append(free)
        left -= {*free}
    return levels


def backwards(edges: Edges) -> list[tuple[str, str]]:
    """The arrows that point back up."""
    level = {place: index for index, row in enumerate(rows(edges)) for place in row}
    return sorted(edge for edge in edges if level[edge[0]] >= level[edge[1]])


def draw(title: str, edges: Edges) -> str:
    """Return an SVG: places in rows, arrows from what imports to what is imported."""
    back = {*backwards(edges)}
    places: dict[str, tuple[float, float]] = {}
    boxes, levels = [], rows(edges)
    for index, row in enumerate(levels):
        width = (WIDTH - GAP * (len(row) + 1)) / len(row)
        width = min(width, 180)
        start = (WIDTH - len(row) * width - GAP * (len(row) - 1)) / 2
        for place, name in enumerate(row):
            left, top = start + place * (width + GAP), 4 + index * LINE
            places[name] = left + width / 2, top
            boxes.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{BOX}" rx="5" fill="#e8f1fa" '
                f'stroke="#5b8db8"/><text x="{left + width / 2:.0f}" y="{top + 22}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
    arrows = []
    for (source, target), count in sorted(edges.items()):
        (x1, y1), (x2, y2) = places[source], places[target]
        is_back = (source, target) in back
        down = y2 > y1
        begin, end = (y1 + BOX, y2) if down else (y1, y2 + BOX)
        color = "#c0392b" if is_back else "#8aa"
        arrows.append(
            f'<line x1="{x1:.0f}" y1="{begin:.0f}" x2="{x2:.0f}" y2="{end:.0f}" stroke="{color}" '
            f'stroke-width="{min(1 + count / 8, 4):.1f}" marker-end="url(#tip)"><title>{escape(source)} to '
            f"{escape(target)}: {count} import(s)</title></line>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{len(levels) * LINE}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{escape(title)}</title><defs><marker id="tip" '
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto"><path '
        f'd="M0,0 L8,4 L0,8 z" fill="#688"/></marker></defs>{"".join(arrows)}{"".join(boxes)}</svg>\n'
    )


def way(name: str) -> str:
    """Return the modules of a way as a list, each with the first line of its docstring.

    Raises:
        ValueError: If a module is gone, or does not import the next one.
    """
    known, lines = _modules(), []
    modules = WAYS[name]
    for place, module in enumerate(modules):
        if module not in known:
            raise ValueError(f"The way of {name} goes through {module}, which is not there any more.")
        if place + 1 < len(modules) and modules[place + 1] not in _imported(module, for_types=True):
            raise ValueError(f"The way of {name}: {module} does not import {modules[place + 1]} any more.")
        summary = (ast.get_docstring(known[module].tree) or "").splitlines()[0]
        lines.append(f"{place + 1}. `{module}`: {summary}")
    return "\n".join(lines)


def _figures() -> str:
    lines = ["| package | places | arrows | back up |", "|---|---|---|---|"]
    for package in sorted(packages(ROOT)):
        edges = folders(package.replace("-", "_"))
        places = {place for edge in edges for place in edge}
        lines.append(f"| {package} | {len(places)} | {len(edges)} | {len(backwards(edges))} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put a way in the place of `# way of NAME`, and the figures in that of `# figures of the house`."""
    shown = re.sub(r"^# way of (.+)$", lambda match: way(match[1]), markdown, flags=re.MULTILINE)
    return re.sub(r"^# figures of the house$", lambda match: _figures(), shown, flags=re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pictures to the files of the site."""
    pictures = {"house": draw("The seven packages, and which imports which", house())}
    for package in packages(ROOT):
        name = package.replace("-", "_")
        pictures[name] = draw(f"The folders of {package}", folders(name))
    for name, picture in pictures.items():
        files.append(File.generated(config, f"img/{name}.svg", content=picture))
    return files
