"""Commit a checkpoint folder atomically: the protocol on the disk, for the one process that commits.

1. Everything is written into a *staging* folder next to the target, `.<name>.staging-<token>`.
2. `seal`: every file is flushed to the disk; then the manifest is written, whose presence says "complete".
3. `commit`: one rename makes the staging folder the target. An existing checkpoint is renamed
   first (`.<name>.replaced-<token>`) and deleted afterwards.

If the process is killed at any point, the old checkpoint, the new one, or both exist. Between the two renames
of step 3 nothing has the target's name; `recovery.find` then returns the sealed new one.

A target that cannot be renamed (a mount point, the current folder), or that contains other files, is
committed in place: the staging folder is inside the target, and its sealed files are moved out of it one by
one. Once sealed, `recovery.find` finishes a move that was interrupted or has failed.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import MANIFEST, role_of
from accel_ckpt.files.digests import FileEntry
from accel_ckpt.files.disk import flush
from accel_ckpt.files.paths import is_inside
from accel_ckpt.files.writer import Writer
from accel_ckpt.folder import manifest
from accel_ckpt.folder.recovery import discard, folders_of, is_needed, move_out, sweep


def new_token() -> str:
    """Return a name for one save, with the machine and the process that make it."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def staging_path(target: Path, token: str) -> Path:
    """Return the folder in which a checkpoint is written before it appears.

    Args:
        target: The checkpoint folder; absolute, symbolic links resolved.
        token: The save's name.
    """
    if _is_replaceable(target):
        return target.parent / f".{target.name}.staging-{token}"
    return target / f".staging-{token}"


def seal(
    staging: Path,
    facts: Mapping[str, Any],
    writer: Writer | None = None,
    described: Iterable[FileEntry] = (),
) -> None:
    """Flush a finished staging folder to the disk and write its manifest.

    Args:
        staging: The folder.
        facts: What to record about the run; JSON values.
        writer: The writer of its files, which is used further; by default a new one.
        described: Files that other processes have written, flushed and described.

    Raises:
        OSError: If the disk cannot write it.
        CheckpointError: If it contains anything but files and folders, or a name that no load accepts.
    """
    if writer is None:
        with closing(Writer()) as writer:
            seal(staging, facts, writer, described)
        return
    names = manifest.files_in(staging)
    _check_names(names)
    # A machine with its own disk has other files under these names, or none.
    # Sizes are enough here: each process digests the files it writes, and a load compares the digests.
    from_other_ranks = {entry.path: entry for entry in described if _exists(staging, entry)}
    entries = from_other_ranks | {entry.path: entry for entry in writer.entries(staging)}
    for name in names:
        if name not in entries:  # written by a hook, or by another process with its own writer
            writer.add_existing(staging / name)
    # Read again, as more files were added to the writer.
    entries |= {entry.path: entry for entry in writer.entries(staging)}
    manifest.write(staging, manifest.Manifest(tuple(entries[name] for name in names), dict(facts)))
    # After the manifest: the folder's entry for it must be on the disk too,
    # before the rename that relies on it.
    for folder in folders_of(staging, names):
        flush(folder)


def commit(staging: Path, target: Path) -> None:
    """Make a sealed staging folder the checkpoint.

    Args:
        staging: The folder, sealed.
        target: The checkpoint folder.

    Raises:
        OSError: If the file system does not allow it. The old checkpoint stays, or the new one is in the
            staging folder, where `recovery.find` finds it.
    """
    try:
        # The place of the staging folder decides how it is committed; staging_path chose it when the save
        # began.
        if staging.parent == target:
            move_out(staging, target)
        else:
            _swap(staging, target)
    except OSError as error:
        if not is_needed(staging, target):
            raise
        raise OSError(
            error.errno,
            f"{error.strerror or error}: the checkpoint is written, but could not be moved to its place. It "
            f"is kept in {staging}; load_state({str(target)!r}) and the next save to that folder use it",
        ) from error
    # Only now: what an interrupted save left may have been the only checkpoint.
    sweep(target)


def _check_names(names: Iterable[str]) -> None:
    unfit = [name for name in names if not is_inside(name)]
    if unfit:
        raise CheckpointError(
            f"a checkpoint cannot hold {', '.join(map(repr, unfit))}: with a backslash, or a drive letter "
            "such as 'C:', it leads out of the folder on Windows. Use another name in the hook that "
            "writes it."
        )


def _swap(staging: Path, target: Path) -> None:
    token = staging.name.rpartition(".staging-")[2]
    # The same token, so that recovery knows which process may still be using it.
    replaced = target.parent / f".{target.name}.replaced-{token}"
    exists = target.exists()
    if exists:
        os.rename(target, replaced)
    try:
        os.rename(staging, target)
    except OSError:
        if exists:
            os.rename(replaced, target)
        raise
    # The names are on the disk before the old checkpoint is deleted.
    flush(target.parent)
    discard(replaced)


def _is_replaceable(target: Path) -> bool:
    if not target.exists():
        return True
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file. Save into a folder, or delete the file.")
    here = Path.cwd().resolve()
    if (
        # The current folder and its parents: after a rename the process would be in the old checkpoint.
        target == here
        or target in here.parents
        or os.path.ismount(target)
        or not os.access(target.parent, os.W_OK)
    ):
        return False
    return not _has_other_files(target)


def _has_other_files(target: Path) -> bool:
    """Whether the folder contains files that no save wrote."""
    try:
        described = manifest.read(target)
    except CheckpointError:
        described = None
    for base, folders, names in os.walk(target):
        # In place, so that os.walk does not enter staging folders of interrupted saves.
        folders[:] = [name for name in folders if not name.startswith(".staging-")]
        for name in names:
            path = Path(base, name).relative_to(target).as_posix()
            is_ours = path in described.paths() if described else role_of(path) != "other"
            if not is_ours and path != MANIFEST:
                return True
    return False


def _exists(staging: Path, entry: FileEntry) -> bool:
    try:
        status = (staging / entry.path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.size
