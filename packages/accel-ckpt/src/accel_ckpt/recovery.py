"""Finding checkpoints after interrupted saves, finishing what can be finished, and deleting what was left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from pathlib import Path

from accel_ckpt import manifest
from accel_ckpt.errors import CheckpointError
from accel_ckpt.layout import MANIFEST

__all__ = ["discard", "find", "finish", "flush", "move_out", "sweep", "sweep_folder"]

_ABANDONED_S = 24 * 3600
_TOKEN = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")


def find(target: Path) -> Path:
    """Find the complete checkpoint that goes by a name.

    Args:
        target: The checkpoint folder.

    Returns:
        The folder to read: the target, or, if a save was interrupted between its last two renames, what it
        left.

    Raises:
        FileNotFoundError: If there is none.
    """
    target = target.resolve()
    if target.is_dir():
        finish(target)
        return target
    for kind in ("staging", "replaced"):
        left = target.parent.glob(f".{_escape(target.name)}.{kind}-*") if target.parent.is_dir() else ()
        complete = sorted((folder for folder in left if manifest.is_complete(folder)), key=_age)
        if complete:
            return complete[-1]
    there = _neighbours(target)
    raise FileNotFoundError(
        f"There is no checkpoint {target}." + (f" There is: {', '.join(there)}." if there else "")
    )


def finish(target: Path) -> None:
    """Finish a commit in place that was interrupted.

    Args:
        target: A folder; nothing happens if there is none, or nothing to finish.
    """
    for staging in sorted(target.glob(".staging-*"), key=_age):
        if manifest.is_complete(staging):
            move_out(staging, target)


def discard(folder: Path) -> None:
    """Delete a folder, so that a half-deleted one is never taken for a checkpoint.

    Args:
        folder: The folder; nothing happens if it is not there.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / MANIFEST)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(target: Path) -> None:
    """Delete what interrupted saves of this target have left. Saves that may still run are left alone.

    Args:
        target: A checkpoint folder that is complete.
    """
    name = _escape(target.name)
    patterns = [
        (target.parent, f".{name}.staging-*"),
        (target.parent, f".{name}.replaced-*"),
        (target, ".staging-*"),
    ]
    for folder, pattern in patterns:
        _sweep(folder, pattern)


def sweep_folder(folder: Path) -> None:
    """Delete what interrupted saves into a folder have left, whichever checkpoint they were to be.

    Args:
        folder: A folder with a checkpoint that is complete and newer than these.
    """
    for kind in ("staging", "replaced"):
        _sweep(folder, f".*.{kind}-*")


def _sweep(folder: Path, pattern: str) -> None:
    for left in folder.glob(pattern):
        if _is_abandoned(left):
            discard(left)


def move_out(staging: Path, target: Path) -> None:
    """Move the files of a sealed folder into the target around it, or go on where an earlier move stopped.

    Args:
        staging: The sealed folder, inside the target.
        target: The checkpoint folder.
    """
    new = manifest.read(staging)
    if new is None:  # another process has just finished it
        return
    try:
        old = manifest.read(target)
    except CheckpointError:
        old = None
    for entry in new.files:
        source, goal = staging / entry.path, target / entry.path
        goal.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # moved before the interruption
            os.replace(source, goal)
            flush(goal.parent)
    for path in (old.paths() if old else frozenset()) - new.paths():
        (target / path).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(staging / MANIFEST, target / MANIFEST)
    flush(target)
    shutil.rmtree(staging, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handles on folders to flush
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_abandoned(left: Path) -> bool:
    found = _TOKEN.fullmatch(re.split(r"\.(?:staging|replaced)-", left.name)[-1])
    if found is None:
        return False
    if time.time() - _age(left) > _ABANDONED_S:
        return True
    if found["host"] != socket.gethostname():
        return False
    pid = int(found["pid"])
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _age(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _neighbours(target: Path) -> list[str]:
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(path.name for path in beside if path.name[0] != "." and manifest.is_complete(path))
