"""Finding checkpoints after interrupted saves, finishing what can be finished, and deleting what was left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files.disk import flush
from accel_ckpt.folder import manifest
from accel_state.logging.warning import warn

# On another machine no process can be asked for: no save takes a day.
_ABANDONED_S = 24 * 3600
_TOKEN = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")


def find(target: Path) -> Path:
    """Find the complete checkpoint that goes by a name.

    Args:
        target: The checkpoint folder.

    Returns:
        The folder to read: the target, or, if a save was interrupted between its last two renames or could
        not do them, what it left.

    Raises:
        FileNotFoundError: If there is none.
    """
    target = target.resolve()
    finish(target)
    if not manifest.is_checkpoint(target):
        left = _left_beside(target)
        if left is not None:
            return left
    if target.is_dir():
        return target
    there = _neighbours(target)
    raise FileNotFoundError(
        f"There is no checkpoint {target}." + (f" There is: {', '.join(there)}." if there else "")
    )


def restore_name(target: Path) -> None:
    """Give a checkpoint its name again that an interrupted save has left beside it, before the next save.

    Args:
        target: The checkpoint folder.

    Raises:
        OSError: If the file system does not allow it.
    """
    # Beside a target that is there, what was left is the older checkpoint, or one that was never committed.
    if target.exists():
        finish(target)
        return
    left = _left_beside(target)
    if left is not None and _is_abandoned(left):
        os.rename(left, target)


def finish(target: Path) -> None:
    """Finish a commit in place that was interrupted.

    Args:
        target: A folder; nothing happens if there is none, or nothing to finish.
    """
    # The oldest first, so that the newest files are those that stay.
    for staging in sorted(target.glob(".staging-*"), key=_age):
        if manifest.is_complete(staging):
            move_out(staging, target)


def is_needed(staging: Path, target: Path) -> bool:
    """Return whether a commit that failed has left a checkpoint that is whole in its staging folder alone.

    Args:
        staging: The staging folder.
        target: The checkpoint folder.
    """
    if not manifest.is_complete(staging):
        return False
    # In place, some files of the old checkpoint may have been replaced already.
    return staging.parent == target or not manifest.is_checkpoint(target)


def abandon(staging: Path, target: Path) -> None:
    """Delete the staging folder of a commit that failed, unless a checkpoint would be lost with it.

    Args:
        staging: The staging folder.
        target: The checkpoint folder.
    """
    if not is_needed(staging, target):
        discard(staging)


def discard(folder: Path) -> None:
    """Delete a folder, so that a half-deleted one is never taken for a checkpoint.

    One that cannot be deleted stays, with a warning: nothing that was saved depends on it.

    Args:
        folder: The folder; nothing happens if it is not there.
    """
    try:
        # The manifest first: without it the rest is not a checkpoint, however far the deletion gets.
        os.unlink(folder / MANIFEST)
    except FileNotFoundError:
        pass
    except OSError as error:
        warn(
            f"{folder} is no longer needed and cannot be deleted ({error}). Delete it yourself.",
            about="process",
        )
        return
    shutil.rmtree(folder, ignore_errors=True)


def sweep(target: Path) -> None:
    """Delete what interrupted saves of this target have left. Saves that may still run are left alone.

    Args:
        target: A checkpoint folder that is complete.
    """
    for kind in ("staging", "replaced"):
        _sweep(_starting(target.parent, f".{target.name}.{kind}-"))
    _sweep(_starting(target, ".staging-"))


def sweep_folder(folder: Path) -> None:
    """Delete what interrupted saves into a folder have left, whichever checkpoint they were to be.

    Args:
        folder: A folder with a checkpoint that is complete and newer than these.
    """
    for kind in ("staging", "replaced"):
        _sweep(folder.glob(f".*.{kind}-*"))


def _starting(folder: Path, prefix: str) -> list[Path]:
    """The entries of a folder whose names start so; none where it is no folder."""
    # No glob: Python keeps up to 32,768 patterns, of which each checkpoint would have some of its own.
    return [path for path in folder.iterdir() if path.name.startswith(prefix)] if folder.is_dir() else []


def _sweep(found: Iterable[Path]) -> None:
    for left in found:
        if _is_abandoned(left):
            discard(left)


def check_room(staging: Path, target: Path) -> None:
    """Check that the files of a staging folder can be moved into the target that it lies in.

    Args:
        staging: The folder, inside the target.
        target: The checkpoint folder.

    Raises:
        CheckpointError: If a folder is in the way of a file, or a file in the way of a folder.
    """
    for name in manifest.files_in(staging):
        above = [target / parent for parent in PurePosixPath(name).parents[:-1]]
        blocking = [path for path in above if path.exists() and not path.is_dir()]
        if (target / name).is_dir():
            blocking.append(target / name)
        if blocking:
            raise CheckpointError(
                f"{blocking[0]} is in the way of {name}, a file of the checkpoint. Move it away, or save "
                "into another folder."
            )


def move_out(staging: Path, target: Path) -> None:
    """Move the files of a sealed folder into the target that it lies in, or continue an earlier move.

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
    # Before files of the old checkpoint go and the manifest is moved.
    for folder in folders_of(target, new.paths()):
        flush(folder)
    for path in (old.paths() if old else frozenset()) - new.paths():
        (target / path).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(staging / MANIFEST, target / MANIFEST)
    flush(target)
    # Empty folders are left there.
    shutil.rmtree(staging, ignore_errors=True)


def folders_of(root: Path, names: Iterable[str]) -> set[Path]:
    """Return the folders that files are in, with all those between them and the root."""
    # Each folder once, as there may be tens of thousands of files.
    folders = {PurePosixPath(folder) for folder in {name.rpartition("/")[0] for name in names}}
    return {root, *(root / part for folder in folders for part in (folder, *folder.parents))}


def _left_beside(target: Path) -> Path | None:
    """The complete checkpoint that a save has left which was interrupted between its last two renames."""
    for kind in ("staging", "replaced"):
        left = _starting(target.parent, f".{target.name}.{kind}-")
        complete = sorted((folder for folder in left if manifest.is_complete(folder)), key=_age)
        if complete:
            return complete[-1]
    return None


def _is_abandoned(left: Path) -> bool:
    found = _TOKEN.fullmatch(re.split(r"\.(?:staging|replaced)-", left.name)[-1])
    if found is None:
        return False
    # The folder's time, which changes when a file is made directly in it.
    if time.time() - _age(left) > _ABANDONED_S:
        return True
    if found["host"] != socket.gethostname():
        return False
    pid = int(found["pid"])
    # Saves of one process come one after another, so that this one's are over when another is swept.
    if pid == os.getpid():
        return True
    # There os.kill ends the process that it asks for. What was left is deleted after a day.
    if sys.platform == "win32":
        return False
    try:
        # Signal 0 only asks whether there is such a process.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # The process is there, and belongs to another user.
    except PermissionError:
        pass
    return False


def _age(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _neighbours(target: Path) -> list[str]:
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(path.name for path in beside if path.name[0] != "." and manifest.is_complete(path))
