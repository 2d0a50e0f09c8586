"""The file in which a worker records the exception that ends it; see `accel_state.process.failure`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel_state import env


@dataclass(frozen=True)
class Raised:
    """An exception that ended a worker.

    Args:
        at: When it was raised, from time.time().
        text: Its traceback; empty if it could not be written.
    """

    at: float
    text: str


def read_record(path: Path) -> Raised | None:
    """Return the exception that a worker recorded.

    Args:
        path: The file, which exists if there was an exception.
    """
    try:
        # The file's time, by this machine's clock, not the worker's.
        at = path.stat().st_mtime
    except OSError:
        return None
    try:
        return Raised(at, str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]))
    except (OSError, ValueError, LookupError, TypeError):  # the disk was full
        return Raised(at, "")


@contextlib.contextmanager
def record_folder() -> Iterator[Path | None]:
    """Make a folder for workers' records for the length of a `with` block.

    Yields:
        The folder; None if it cannot be created, which must not stop the run.
    """
    # Not by tempfile, whose import takes longer than all others here.
    folder = Path(env.raw("TMPDIR") or "/tmp", f"accel-launch-{os.getpid()}-{os.urandom(8).hex()}")
    try:
        folder.mkdir(0o700)
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            # Only files: each worker writes one.
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
