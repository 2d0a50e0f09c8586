"""Prints the rows as one table, and writes it into the page of the manual that shows it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from .row import Row

__all__ = ["HEADLINES", "headlines", "render", "setting", "write"]

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
    "save_state(blocking=False), 400 MB with AdamW: time it holds / blocking save",
    "load_state of 400 MB of weights with AdamW, from the system's cache: time of accelerate / accel",
    "load_state of 400 MB of weights with AdamW, from the disk: time of accelerate / accel",
    "load_checkpoint_and_dispatch of 400 MiB in 400 modules to the CPU: time of accelerate / accel",
    "`from accel import Accelerator`: CPU time / `import torch`",
    "`accel launch script.py`, 1 process: wall seconds over `python script.py`",
    "`accel launch script.py`, 2 processes: wall time / torchrun",
)
"""The rows that the README shows, misses of limits among them."""


def headlines(rows: Sequence[Row]) -> str:
    """Return the table of the README: what is measured, accel's value, its limit, and that of accelerate."""
    found = {row.what: _cells(row) for row in rows}
    chosen = [found[name] for name in HEADLINES if name in found]
    lines = [f"| {what} | {value} | {limit} | {peer} |" for what, value, limit, _, peer, *_ in chosen]
    return "\n".join(["| measured | accel | limit | accelerate |", "|---|---|---|---|", *lines])


def render(rows: Sequence[Row], failures: Mapping[str, str] | None = None) -> str:
    """Return the rows as a Markdown table, with the columns aligned for reading as plain text.

    Args:
        rows: What was measured.
        failures: What could not be: errors by the names of sections, which come last.
    """
    cells = [HEADER, *(_cells(row) for row in rows)]
    for name, error in (failures or {}).items():
        text = f"section {name} did not run: {error}".replace("|", "/")
        cells.append((text, "", "", "FAIL", *[""] * (len(HEADER) - 4)))
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
    lines = [_line(line, widths) for line in cells]
    return "\n".join([lines[0], _line(["-" * width for width in widths], widths), *lines[1:]])


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
    text = page.read_text()
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(
            f"{page} has no place for the table: it needs a line {marks[0]!r} and then a line {marks[1]!r}"
        )
    page.write_text(f"{before}{begin}\n\n{note}\n\n{table}\n\n{end}{after}")
