"""Reading what runs have logged: files of the built-in tracker, and the files of statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LARGEST = 1e300  # a value above is drawn as an infinite one

Points = list[tuple[float, float]]
"""(step, value), as they were logged; values may be NaN or infinite."""


@dataclass(frozen=True)
class Image:
    """An image that was logged: its name, its step if it has one, and its file."""

    name: str
    step: int | None
    path: Path


@dataclass(frozen=True)
class Table:
    """A table that was logged, with its rows."""

    name: str
    step: int | None
    columns: list[Any]
    rows: list[list[Any]]


@dataclass
class LoggedRun:
    """The values that one run has logged so far.

    Attributes:
        name: Its name, for headings.
        config: Its configuration; the newest, of a run that was started again.
        curves: Points by the name of the value; nested names are joined by "/".
        texts: The newest text by the name of the value.
        images: The images.
        tables: The newest table of each name.
        summary: What `summary.json` has, if there is one.
        slow: Slow processes that statistics have found, with the step: {"step", "rank", "part", "ratio"}.
        unread: Number of lines that could not be read.
    """

    name: str
    config: Any = None
    curves: dict[str, Points] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: list[Image] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    slow: list[dict[str, Any]] = field(default_factory=list)
    unread: int = 0


def read_runs(path: Path) -> list[LoggedRun]:
    """Read a run, or the runs of a folder.

    Args:
        path: A file of JSON lines, or a folder with such files in it or in its own folders.

    Returns:
        The runs, by name. The statistics of a folder come with its first run, or are a run where there is
        no other.

    Raises:
        FileNotFoundError: If there is no such path, or nothing of a run in it.
    """
    if path.is_file():
        return [_read_run(path, path.stem, with_statistics=True)]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder nor a file of JSON lines.")
    runs = []
    for folder in (path, *sorted(item for item in path.iterdir() if item.is_dir())):
        prefix = "" if folder == path else f"{folder.name}/"
        files = sorted(item for item in folder.glob("*.jsonl") if item.name != "statistics.jsonl")
        runs += [
            _read_run(file, prefix + file.stem, with_statistics=place == 0)
            for place, file in enumerate(files)
        ]
        if not files and ((folder / "summary.json").is_file() or (folder / "statistics.jsonl").is_file()):
            runs.append(_read_run(folder / "statistics.jsonl", folder.resolve().name, with_statistics=True))
    if not runs:
        raise FileNotFoundError(
            f"{path} has no run: neither *.jsonl, which the tracker 'jsonl' writes, nor summary.json or "
            "statistics.jsonl, which statistics write, in it or in its folders."
        )
    return runs


def _read_run(file: Path, name: str, with_statistics: bool) -> LoggedRun:
    run = LoggedRun(name)
    if file.name != "statistics.jsonl":
        _add_lines(run, file)
    if with_statistics:
        _add_lines(run, file.with_name("statistics.jsonl"))
        run.summary = _summary(file.with_name("summary.json"))
    return run


def _summary(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # written at the end alone
        return None
    is_one = isinstance(found, dict) and found.get("version") == 1 and found.get("ranks")
    return found if is_one else None


def _add_lines(run: LoggedRun, file: Path) -> None:
    try:
        # A line that a kill has cut within a character must not hide the others.
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    # Only what ends in a newline is complete: the run may be writing the last line.
    for line in text.split("\n")[:-1]:
        if not line:
            continue
        try:
            entry = json.loads(line)
            _add(run, entry, file.parent)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            run.unread += 1


def _add(run: LoggedRun, entry: Mapping[str, Any], folder: Path) -> None:
    step = entry.get("step")
    if step is not None and not math.isfinite(step):
        raise ValueError(f"step {step}")
    if "config" in entry:
        run.config = entry["config"]
    for name, value in _flat(entry.get("values", {})):
        number = _number(value)
        if number is None:
            run.texts[name] = str(value)
            continue
        # Values without steps are counted.
        points = run.curves.setdefault(name, [])
        points.append((float(len(points) if step is None else step), number))
    for name, paths in entry.get("images", {}).items():
        run.images += [Image(name, step, folder / path) for path in paths if _is_inside(path)]
    if "table" in entry:
        rows = [list(row) for row in entry["data"]]
        run.tables[entry["table"]] = Table(entry["table"], step, list(entry["columns"] or ()), rows)
    for slow in entry.get("slow", []):
        rank, section, ratio = int(slow["rank"]), str(slow["part"]), float(slow["ratio"])
        run.slow.append({"step": step, "rank": rank, "part": section, "ratio": ratio})


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    # Booleans are numbers here, drawn as 0 and 1.
    if not isinstance(value, int | float):
        return None
    # Beyond, the range of a curve overflows.
    if abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value)


def _is_inside(path: str) -> bool:
    """Whether a path stays in the run's folder: the file may come from anywhere."""
    segments = Path(path).parts
    return path.endswith(".png") and not Path(path).is_absolute() and ".." not in segments
