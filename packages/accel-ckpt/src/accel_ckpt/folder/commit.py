"""Making a checkpoint folder appear whole: the protocol on the disk, for one process that owns the folder.

1. Everything is written into a *staging* folder beside the target, `.<name>.staging-<token>`.
2. `seal`: every file is flushed to the disk; then the manifest is written, whose presence says "complete".
3. `commit`: one rename makes the staging folder the target. A checkpoint that was there is renamed aside
   first (`.<name>.replaced-<token>`) and deleted afterwards.

Killed anywhere, there is the old checkpoint, the new one, or both. In the moment between the two renames of
step 3 there is nothing under the target's own name; `recovery.find` then returns the sealed new one.

A target that cannot be renamed as a whole (a mount point, the current folder), or in which other files live,
is committed in place: the staging folder lies inside the target, and its sealed files are moved out of it one
by one. Once sealed, `recovery.find` finishes a move that was interrupted or has failed.
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
    """Return a name for one save, with the machine and the process that work on it."""
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
    staging: Path, facts: Mapping[str, Any], writer: Writer | None = None, known: Iterable[FileEntry] = ()
) -> None:
    """Flush a finished staging folder to the disk and write its manifest.

    Args:
        staging: The folder.
        facts: What to record about the run; JSON values.
        writer: What has written files of it, and goes on here; by default a new one.
        known: Files that other processes have written, flushed and described.

    Raises:
        OSError: If the disk does not take it.
        CheckpointError: If there is something else than files and folders, or a name that no load takes.
    """
    if writer is None:
        with closing(Writer()) as writer:
            seal(staging, facts, writer, known)
        return
    names = manifest.files_in(staging)
    _check_names(names)
    # A machine with a disk of its own has other files under these names, or none.
    # Sizes are enough here: each process digests what it has written, and a load compares the digests.
    elsewhere = {entry.path: entry for entry in known if _is_here(staging, entry)}
    entries = elsewhere | {entry.path: entry for entry in writer.entries(staging)}
    for name in names:
        if name not in entries:  # a hook has written it, or another process with a writer of its own
            writer.follow(staging / name)
    # Asked for again, as the writer has taken up more files since.
    entries |= {entry.path: entry for entry in writer.entries(staging)}
    manifest.write(staging, manifest.Manifest(tuple(entries[name] for name in names), dict(facts)))
    # After the manifest: a folder's entry for it must be on the disk too,
    # before the rename that counts on it.
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
        # Where staging lies says how it is committed; staging_path has decided that when the save began.
        if staging.parent == target:
            move_out(staging, target)
        else:
            _swap(staging, target)
    except OSError as error:
        if not is_needed(staging, target):
            raise
        raise OSError(
            error.errno,
            f"{error.strerror or error}: the checkpoint is written, and could not be put in its place. It is "
            f"kept in {staging}; load_state({str(target)!r}) and the next save there go on from it",
        ) from error
    # Only now: what an earlier save has left may have been the only checkpoint.
    sweep(target)


def _check_names(names: Iterable[str]) -> None:
    unfit = [name for name in names if not is_inside(name)]
    if unfit:
        raise CheckpointError(
            f"a checkpoint cannot hold {', '.join(map(repr, unfit))}: with a backslash, or a drive letter "
            "such as 'C:', it leads out of the folder on Windows. Have the hook that writes it use another "
            "name."
        )


def _swap(staging: Path, target: Path) -> None:
    token = staging.name.rpartition(".staging-")[2]
    # The same token, so that recovery sees which process may still be at work on it.
    aside = target.parent / f".{target.name}.replaced-{token}"
    replaces = target.exists()
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(staging, target)
    except OSError:
        if replaces:
            os.rename(aside, target)
        raise
    # The names are on the disk before the old checkpoint goes.
    flush(target.parent)
    discard(aside)


def _is_replaceable(target: Path) -> bool:
    if not target.exists():
        return True
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file. Save into a folder, or delete the file.")
    here = Path.cwd().resolve()
    if (
        # The current folder and those above it: after a rename the process would stand in the old checkpoint.
        target == here
        or target in here.parents
        or os.path.ismount(target)
        or not os.access(target.parent, os.W_OK)
    ):
        return False
    return not _strangers(target)


def _strangers(target: Path) -> bool:
    """Whether there is something in the folder that no save has put there."""
    try:
        known = manifest.read(target)
    except CheckpointError:
        known = None
    for base, folders, names in os.walk(target):
        # In place, so that os.walk does not go into staging folders of interrupted saves.
        folders[:] = [name for name in folders if not name.startswith(".staging-")]
        for name in names:
            path = Path(base, name).relative_to(target).as_posix()
            mine = path in known.paths() if known else role_of(path) != "other"
            if not mine and path != MANIFEST:
                return True
    return False


def _is_here(staging: Path, entry: FileEntry) -> bool:
    try:
        found = (staging / entry.path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == entry.size
