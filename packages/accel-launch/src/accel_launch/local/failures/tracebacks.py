"""Read tracebacks in a worker's stderr: the exception, and a line instead of consecutive library frames."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import groupby

HEADER = "Traceback (most recent call last):"
"""The first line of a traceback."""

FOLDED = "  ... "
"""Prefix of a line that replaces frames."""

_LIBRARIES = (
    *("accel", "accel_ckpt", "accel_data", "accel_launch", "accel_ops", "accel_optim", "accel_state"),
    "torch",
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"^\[rank\d+\]: ?(?!\[)", re.MULTILINE)  # torch puts it before each line of a traceback
# Lines of torch's C++ log (level, month and day), which come after a traceback when a process group ends.
_TORCH_LOG = re.compile(r"(?:\[rank\d+\]:)?\[[WEIF]\d{4} ")
_FRAME = re.compile(r'  File "([^"]+)", line \d+, in ')


def clean(text: bytes) -> str:
    """Return what a worker wrote as plain text: without colours, and without torch's rank before each line.

    Args:
        text: The end of its stderr.
    """
    return _RANK.sub("", _COLOUR.sub("", text.decode(errors="replace")))


def last_exception(text: str) -> str:
    """Return the type and message of the exception of the last traceback.

    Args:
        text: Clean text.

    Returns:
        `ValueError: boom`, with further lines if the message has them; "" if there is no traceback.
    """
    # The last one: those before it are its causes ("During handling of ...").
    start = text.rfind(HEADER)
    if start < 0:
        return ""
    lines = text[start:].splitlines()[1:]
    # The first line that is not indented is the exception itself.
    begin = next((i for i, line in enumerate(lines) if line and line[0] != " "), len(lines))
    end = next((i for i in range(begin, len(lines)) if _TORCH_LOG.match(lines[i])), len(lines))
    return "\n".join(lines[begin:end]).rstrip()


def library_folders() -> dict[str, str]:
    """Return the folders of torch and accel's packages, if installed, with their names."""
    found = {}
    for name in _LIBRARIES:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            # With a separator at the end: "accel" must not match "accel_ckpt".
            found[os.path.join(folder, "")] = name.partition("_")[0]
    return found


def fold_frames(text: str, folders: dict[str, str]) -> str:
    """Replace consecutive library frames with one line, except for the last frame of a traceback.

    Args:
        text: Clean text.
        folders: Names of libraries by their folders, which end with a separator.
    """
    lines: list[str] = []
    for of_frames, entries in groupby(_entries(text.splitlines()), key=lambda entry: entry[0] is not None):
        found = list(entries)
        shown = _fold(found, folders) if of_frames else (line for _, entry in found for line in entry)
        lines += shown
    return "\n".join(lines)


def _entries(lines: Iterable[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Split text into frames, each with its file and lines, and other lines."""
    frame: tuple[str | None, list[str]] | None = None
    for line in lines:
        found = _FRAME.match(line)
        if frame is not None and not found and line.startswith(("    ", "  [Previous line")):
            frame[1].append(line)
            continue
        if frame is not None:
            yield frame
        frame = (found[1], [line]) if found else None
        if frame is None:
            yield None, [line]
    if frame is not None:
        yield frame


def _fold(frames: list[tuple[str | None, list[str]]], folders: dict[str, str]) -> Iterator[str]:
    def library(frame: tuple[str | None, list[str]]) -> str | None:
        return next((name for folder, name in folders.items() if (frame[0] or "").startswith(folder)), None)

    # The last frame is where it happened, also inside a library.
    *before, last = frames
    for in_library, run in groupby(before, key=lambda frame: library(frame) is not None):
        found = list(run)
        if in_library:
            names = " and ".join(sorted({str(library(frame)) for frame in found}))
            yield f"{FOLDED}{len(found)} frame{'s' if len(found) > 1 else ''} of {names}"
        else:
            yield from (line for _, entry in found for line in entry)
    yield from last[1]
