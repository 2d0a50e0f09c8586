"""Prints the rows as one table, and writes it, and what follows from it, into the pages that show it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from .row import Row

__all__ = [
    "BESIDE_ACCELERATE",
    "HEADLINES",
    "Cells",
    "beside_accelerate",
    "cells",
    "headlines",
    "put",
    "read",
    "recorded_setting",
    "render",
    "replaced",
    "setting",
    "write",
]

Cells = tuple[str, ...]

BEGIN = "<!-- bench: begin -->"
END = "<!-- bench: end -->"
HEADER = ("measured", "accel", "limit", "", "accelerate", "lightning-fabric", "baseline", "noise")

HEADLINES = (
    "training step of a toy MLP, 1 process: time / plain PyTorch",
    "training step of a toy MLP, 2 processes: time / plain DDP",
    "training loop with windows of 4, 1 process: time / plain PyTorch",
    "iterating a prepared loader, 1 process, 0 workers: time / plain DataLoader",
    "iterating a prepared stream of cheap samples, 1 process: time / plain DataLoader",
    "gather of a dict of 64 small tensors, 2 processes: time / one flat all_gather",
    "dispatch of dicts of 3 tensors, batch 32, 2 processes: time of accelerate / accel",
    "save_state of 400 MB of weights with AdamW: time / raw files with fsync",
    "save_state(blocking=False), 400 MB with AdamW: blocked time / blocking save",
    "load_state of 400 MB of weights with AdamW, from the system's cache: time of accelerate / accel",
    "load_state of 400 MB of weights with AdamW, from the disk: time of accelerate / accel",
    "load_checkpoint_and_dispatch of 400 MiB in 400 modules to the CPU: time of accelerate / accel",
    "`from accel import Accelerator`: CPU time / `import torch`",
    "`accel launch script.py`, 1 process: wall seconds over `python script.py`",
    "`accel launch script.py`, 2 processes: wall time / torchrun",
)
"""The rows that the README shows; those that miss their limit follow them."""

BESIDE_ACCELERATE = {
    "a training step": "training step of a toy MLP, 1 process: time / plain PyTorch",
    "a gather of many tensors": (
        "gather of a dict of 64 small tensors, 2 processes: time of accelerate / accel"
    ),
    "dispatched batches": (
        "dispatch of dicts of 3 tensors, batch 32, 2 processes: time of accelerate / accel"
    ),
    "`infer_auto_device_map`": "infer_auto_device_map of 100000 tensors: CPU time of accelerate / accel",
    "`load_checkpoint_and_dispatch`": (
        "load_checkpoint_and_dispatch of 400 MiB in 400 modules to the CPU: time of accelerate / accel"
    ),
    "`save_state`": "save_state of 400 MB of weights with AdamW: time / raw files with fsync",
    "`load_state` from the system's cache": (
        "load_state of 400 MB of weights with AdamW, from the system's cache: time of accelerate / accel"
    ),
    "`load_state` from the disk": (
        "load_state of 400 MB of weights with AdamW, from the disk: time of accelerate / accel"
    ),
}
"""What the page on migrating compares, and the row that has it."""

_ALIKE = 1.1  # times as long, at most, are "about as much"


def headlines(table: Sequence[Cells]) -> str:
    """Return the table of the README, whose rows that miss their limit say so."""
    found = {line[0]: line for line in table}
    chosen = [found[name] for name in HEADLINES if name in found]
    chosen += [line for line in table if line[3] == "FAIL" and line[0] not in HEADLINES]
    lines = [
        f"| {what} | {value} | {limit} | {'**missed**' if verdict == 'FAIL' else 'met'} | {peer} |"
        for what, value, limit, verdict, peer, *_ in chosen
    ]
    return "\n".join(["| measured | accel | limit | | accelerate |", "|---|---|---|---|---|", *lines])


def beside_accelerate(table: Sequence[Cells]) -> str:
    """Return in words what takes accel less time than accelerate, as much, and more."""
    found = {line[0]: line for line in table}
    groups: dict[str, list[str]] = {"less time": [], "about as much time": [], "more time": []}
    for words, name in BESIDE_ACCELERATE.items():
        if name not in found:
            continue
        value, peer = (cell.partition(" ")[0] for cell in (found[name][1], found[name][4]))
        if not name.endswith("time of accelerate / accel") and not peer:
            continue
        times = float(peer) / float(value) if peer else float(value)
        group = "less time" if times > _ALIKE else "more time" if times < 1 / _ALIKE else "about as much time"
        groups[group].append(words)
    parts = [f"{group} for {_listed(words)}" for group, words in groups.items() if words]
    return f"Measured against accelerate, accel takes {'; '.join(parts)}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def cells(rows: Sequence[Row], failures: Mapping[str, str] | None = None) -> list[Cells]:
    """Return the lines of the table.

    Args:
        rows: What was measured.
        failures: What could not be: errors by the names of sections, which come last.
    """
    lines = [_cells(row) for row in rows]
    for name, error in (failures or {}).items():
        text = f"section {name} did not run: {error}".replace("|", "/")
        lines.append((text, "", "", "FAIL", *[""] * (len(HEADER) - 4)))
    return lines


def render(table: Sequence[Cells]) -> str:
    """Return lines as a Markdown table, with the columns aligned for reading as plain text."""
    table = [HEADER, *table]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
    lines = [_line(line, widths) for line in table]
    return "\n".join([lines[0], _line(["-" * width for width in widths], widths), *lines[1:]])


def read(page: Path) -> list[Cells]:
    """Return the lines of the table that the page has."""
    block = page.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line[1:-1].split(" | ")) for line in lines[2:]]


def recorded_setting(page: Path) -> str:
    """Return the line that says on what the page's table was measured."""
    block = page.read_text().partition(BEGIN)[2].partition(END)[0]
    return block.strip().partition("\n")[0]


def replaced(table: Sequence[Cells], new: Sequence[Cells], sections: Sequence[str]) -> list[Cells]:
    """Return the table with some sections measured again: new rows are put next to those of their section."""
    gone = tuple(f"section {name} did not run" for name in sections)
    kept = [line for line in table if not line[0].startswith(gone)]
    names = [line[0] for line in kept]
    known = [names.index(line[0]) for line in new if line[0] in names]
    place = max(known) + 1 if known else len(kept)
    for line in reversed(new):
        if line[0] in names:
            place = names.index(line[0])
            kept[place] = line
        else:
            names.insert(place, line[0])
            kept.insert(place, line)
    return kept


def _cells(row: Row) -> tuple[str, ...]:
    bound = ">=" if row.at_least else "<="
    limit = f"{bound} {row.limit:g} {row.unit}" + (f", {row.condition[0]}" if row.condition else "")
    peers = (_value(row, row.peers[name]) if name in row.peers else "" for name in HEADER[4:6])
    noise = row.noise and f"{row.noise.median:.3f} ({row.noise.low:.3f} to {row.noise.high:.3f})"
    verdict = "pass" if row.passed else "FAIL"
    return (row.what, _value(row, row.value), limit, verdict, *peers, row.base, noise or "")


def _value(row: Row, value: float) -> str:
    return f"{value:.3f} {row.unit}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def setting() -> str:
    """Return one line that says on what, and with which versions, the rows were measured."""
    packages = ("torch", "accel", "accelerate", "lightning-fabric")
    versions = ", ".join(f"{name} {version}" for name in packages if (version := _version(name)))
    python = f"Python {platform.python_version()}"
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, {python}, {versions}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write(page: Path, table: str, note: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the table between the two marks of the page, in place of the last one.

    Raises:
        ValueError: If the page does not have both marks, in order.
    """
    put(page, f"\n\n{note}\n\n{table}\n\n", marks)


def put(page: Path, content: str, marks: tuple[str, str]) -> None:
    """Put text between two marks of the page, in place of what is there.

    Raises:
        ValueError: If the page does not have both marks, in order.
    """
    text = page.read_text()
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table: it needs {marks[0]!r} and then {marks[1]!r}")
    page.write_text(f"{before}{begin}{content}{end}{after}")
