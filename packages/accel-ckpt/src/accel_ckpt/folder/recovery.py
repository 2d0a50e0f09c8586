"""Recovery after interrupted saves: find checkpoints, finish commits, and delete leftovers."""

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

# Processes of another machine cannot be checked: no save takes a day.
_ABANDONED_S = 24 * 3600
_TOKEN = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")


def find(target: Path) -> Path:
    """Find the complete checkpoint of a name.

    Args:
        target: The checkpoint folder.

    Returns:
        The folder to read: the target, or the folder that a save left when it was interrupted between its
        last two renames or could not do them.

    Raises:
        FileNotFoundError: If there is none.
    """
    target = target.resolve()
    finish(target)
    if not manifest.is_checkpoint(target):
        leftover = _find_leftover(target)
        if leftover is not None:
            return leftover
    if target.is_dir():
        return target
    siblings = _sibling_checkpoints(target)
    raise FileNotFoundError(
        f"There is no checkpoint {target}." + (f" There is: {', '.join(siblings)}." if siblings else "")
    )


def restore_name(target: Path) -> None:
    """Rename a checkpoint that an interrupted save left under another name, before the next save.

    Args:
        target: The checkpoint folder.

    Raises:
        OSError: If the file system does not allow it.
    """
    # If the target exists, the leftover is the older checkpoint, or one that was never committed.
    if target.exists():
        finish(target)
        return
    leftover = _find_leftover(target)
    if leftover is not None and _is_abandoned(leftover):
        os.rename(leftover, target)


def finish(target: Path) -> None:
    """Finish an interrupted commit in place.

    Args:
        target: A folder; nothing happens if it does not exist, or there is nothing to finish.
    """
    # The oldest first, so that the newest files remain.
    for staging in sorted(target.glob(".staging-*"), key=_age):
        if manifest.is_complete(staging):
            move_out(staging, target)


def is_needed(staging: Path, target: Path) -> bool:
    """Return whether the staging folder of a failed commit has the only complete checkpoint.

    Args:
        staging: The staging folder.
        target: The checkpoint folder.
    """
    if not manifest.is_complete(staging):
        return False
    # In place, some files of the old checkpoint may have been replaced already.
    return staging.parent == target or not manifest.is_checkpoint(target)


def abandon(staging: Path, target: Path) -> None:
    """Delete the staging folder of a failed commit, unless a checkpoint would be lost with it.

    Args:
        staging: The staging folder.
        target: The checkpoint folder.
    """
    if not is_needed(staging, target):
        discard(staging)


def discard(folder: Path) -> None:
    """Delete a folder, so that a half-deleted one is never taken for a checkpoint.

    If it cannot be deleted, a warning says so: nothing that was saved depends on it.

    Args:
        folder: The folder; nothing happens if it does not exist.
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
    """Delete the leftovers of interrupted saves of this target, but not of saves that may still run.

    Args:
        target: A complete checkpoint folder.
    """
    for kind in ("staging", "replaced"):
        _sweep(_entries_with_prefix(target.parent, f".{target.name}.{kind}-"))
    _sweep(_entries_with_prefix(target, ".staging-"))


def sweep_folder(folder: Path) -> None:
    """Delete the leftovers of interrupted saves into a folder, of any checkpoint.

    Args:
        folder: A folder with a complete checkpoint that is newer than these.
    """
    for kind in ("staging", "replaced"):
        _sweep(folder.glob(f".*.{kind}-*"))


def _entries_with_prefix(folder: Path, prefix: str) -> list[Path]:
    """Return the entries of a folder whose names have the prefix; none if it is not a folder."""
    # No glob: Python caches up to 32,768 patterns, and each checkpoint would add some.
    return [path for path in folder.iterdir() if path.name.startswith(prefix)] if folder.is_dir() else []


def _sweep(leftovers: Iterable[Path]) -> None:
    for leftover in leftovers:
        if _is_abandoned(leftover):
            discard(leftover)


def check_room(staging: Path, target: Path) -> None:
    """Check that the files of a staging folder can be moved into the target that contains it.

    Args:
        staging: The folder, inside the target.
        target: The checkpoint folder.

    Raises:
        CheckpointError: If a folder has the name of a file, or a file the name of a folder.
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
    """Move the files of a sealed folder into the target that contains it, or continue an interrupted move.

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
        source, destination = staging / entry.path, target / entry.path
        destination.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # moved before the interruption
            os.replace(source, destination)
    # Before files of the old checkpoint are deleted and the manifest is moved.
    for folder in folders_of(target, new.paths()):
        flush(folder)
    for path in (old.paths() if old else frozenset()) - new.paths():
        (target / path).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(staging / MANIFEST, target / MANIFEST)
    flush(target)
    # Only empty folders are left.
    shutil.rmtree(staging, ignore_errors=True)


def folders_of(root: Path, names: Iterable[str]) -> set[Path]:
    """Return the folders of files, with all their parents up to the root."""
    # Each folder once, as there may be tens of thousands of files.
    folders = {PurePosixPath(folder) for folder in {name.rpartition("/")[0] for name in names}}
    return {root, *(root / item for folder in folders for item in (folder, *folder.parents))}


def _find_leftover(target: Path) -> Path | None:
    """Return the complete checkpoint of a save that was interrupted between its last two renames."""
    for kind in ("staging", "replaced"):
        leftovers = _entries_with_prefix(target.parent, f".{target.name}.{kind}-")
        complete = sorted((folder for folder in leftovers if manifest.is_complete(folder)), key=_age)
        if complete:
            return complete[-1]
    return None


def _is_abandoned(leftover: Path) -> bool:
    match = _TOKEN.fullmatch(re.split(r"\.(?:staging|replaced)-", leftover.name)[-1])
    if match is None:
        return False
    # The folder's mtime, which changes when a file is created directly in it.
    if time.time() - _age(leftover) > _ABANDONED_S:
        return True
    if match["host"] != socket.gethostname():
        return False
    pid = int(match["pid"])
    # A process saves one checkpoint at a time: its previous save is over when it sweeps.
    if pid == os.getpid():
        return True
    # On Windows os.kill would end the process. Leftovers are deleted after a day.
    if sys.platform == "win32":
        return False
    try:
        # Signal 0 only checks whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # The process exists, and belongs to another user.
    except PermissionError:
        pass
    return False


def _age(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _sibling_checkpoints(target: Path) -> list[str]:
    entries = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(path.name for path in entries if path.name[0] != "." and manifest.is_complete(path))
