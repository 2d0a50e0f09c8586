"""A tracker without dependencies: one line of JSON per call, in one file per run."""

from __future__ import annotations

import json
import math
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from accel.trackers.base import GeneralTracker, on_main_process
from accel.trackers.values import images, plain


class JSONLTracker(GeneralTracker):
    """Writes `logging_dir/run_name.jsonl`, which can be read at any time.

    Each line is a JSON object, in a single write to the end of the file: every call that has returned is
    there when the process is killed. A reader may see the first half of a line that is being written, and a
    kill may leave that: a line is complete when it ends in a newline. The configuration is the first line of
    a run; a run that is started again under the same name continues in the same file, on a new line. JSON has
    no NaN and no infinities: they are written as "NaN", "Infinity" and "-Infinity".

    Example:
        A file of a short run::

            {"time": 1764000000.125, "run": "digits", "config": {"lr": 0.1}}
            {"time": 1764000001.5, "step": 1, "values": {"loss": 2.3}}

    Args:
        run_name: The name of the file.
        logging_dir: Its folder.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / f"{run_name}.jsonl"
        self._file: int | None = None
        self._ends_in_half = False  # whether the file ends in half a line

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Windows would write each newline as two characters.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o666)
        size = os.fstat(self._file).st_size
        # Writes go to the end, wherever this one reads.
        os.lseek(self._file, max(0, size - 1), os.SEEK_SET)
        # As a kill within a write leaves it, or a full disk.
        self._ends_in_half = os.read(self._file, 1) not in (b"", b"\n")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write `values` as `{"time", "run", "config"}`, nested as they are."""
        self._write({"time": _now(), "run": self.run_name, "config": values})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write `{"time", "step", "values"}`, and `kwargs` in the same line."""
        self._write({"time": _now(), "step": step, "values": values, **kwargs})

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write PNG files to the folder `run_name_images`, and a line with their paths.

        Raises:
            TypeError: If a value is neither a tensor, an array nor an image of PIL.
        """
        folder = self.path.with_name(f"{self.path.stem}_images")
        folder.mkdir(exist_ok=True)
        stem = "" if step is None else f"_{step}"
        paths: dict[str, list[str]] = {}
        for key, value in values.items():
            for index, image in enumerate(images(value)):
                path = _free(folder, f"{key.replace('/', '_')}{stem}_{index}")
                path.write_bytes(_png(image))
                paths.setdefault(key, []).append(f"{folder.name}/{path.name}")
        self._write({"time": _now(), "step": step, "images": paths, **kwargs})

    @on_main_process
    def _log_rows(
        self, table_name: str, columns: list[str], rows: list[list[Any]], step: int | None, **kwargs: Any
    ) -> None:
        """Write a table as `{"time", "step", "table", "columns", "data"}`."""
        line = {"time": _now(), "step": step, "table": table_name, "columns": columns, "data": rows}
        self._write({**line, **kwargs})

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open: call init_trackers first, and end_training last.")
        try:
            text = _ENCODER.encode(line)
        except (TypeError, ValueError):  # a key that is not a string, or a number that JSON does not have
            text = _ENCODER.encode(valid_json(plain(line)))
        data = f"\n{text}\n".encode() if self._ends_in_half else f"{text}\n".encode()
        written = os.write(self._file, data)
        self._ends_in_half = written < len(data)
        if self._ends_in_half:
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")


# Without NaN, which `json` writes as no other reader takes it.
_ENCODER = json.JSONEncoder(allow_nan=False, default=plain)


def _now() -> float:
    return round(time.time(), 3)


def valid_json(value: Any) -> Any:
    """Write out NaN and infinities as text: JSON has neither."""
    if isinstance(value, dict):
        return {key: valid_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [valid_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _free(folder: Path, stem: str) -> Path:
    """A file that is not there yet: an earlier line of the run may name one of that name."""
    path, number = folder / f"{stem}.png", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.png"
    return path


def _png(image: Any) -> bytes:
    """Encode an array of bytes (height, width) or (height, width, channels) as PNG."""
    if not hasattr(image, "shape"):  # an image object of another tracker's library, or a path
        raise TypeError(
            f"the jsonl tracker writes tensors, arrays and images of PIL; got {type(image).__name__}."
        )
    height, width = image.shape[:2]
    color = {1: 0, 3: 2, 4: 6}[image.shape[2] if image.ndim == 3 else 1]  # grey, RGB, RGBA
    rows = b"".join(b"\0" + row.tobytes() for row in image)  # each row begins with its filter: none
    head = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
