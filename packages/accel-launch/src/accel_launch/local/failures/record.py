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
        at: When it came, from time.time().
        text: Its traceback; empty where it could not be written.
    """

    at: float
    text: str


def read_record(path: Path) -> Raised | None:
    """Return the exception that a worker recorded.

    Args:
        path: The file, which is there if there was an exception.
    """
    try:
        # The file's time, by the clock of this machine, and not what the worker wrote.
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
        The folder; None where there is no room for one, which is no reason not to start.
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
            # Only files: workers write one each, and nothing else is put there.
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
