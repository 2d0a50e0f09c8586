"""Automatically named checkpoints: which there are, which is the newest, and how old ones go.

Their order is that in which they were committed. Each commit writes a sequence number into its manifest, one
above all that are in the folder. A checkpoint without one (from an earlier version, or another
implementation) counts as if it were the number in its name.
"""

from __future__ import annotations

import os
from pathlib import Path

from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import iteration_of
from accel_ckpt.folder import commit, manifest, recovery
from accel_state.logging.warning import warn


def checkpoints(folder: str | Path) -> list[Path]:
    """List the complete checkpoints of a project, in the order of their commits.

    A folder counts if it has a manifest, or the files of another implementation.

    Args:
        folder: The folder that they are in (`<project_dir>/checkpoints`).
    """
    return [path for _, _, path in _ordered(Path(folder))]


def next_number(folder: str | Path) -> int:
    """Return the lowest number above all names `checkpoint_<number>` in a folder, whatever they are.

    Args:
        folder: The folder of the checkpoints; it need not be there.
    """
    # Above the highest, not their count: some in between may have been deleted.
    return max((number for number, _ in _numbered(Path(folder))), default=-1) + 1


def next_sequence(folder: str | Path) -> int:
    """Return the sequence number of the next commit.

    Args:
        folder: The folder of the checkpoints; it need not be there.
    """
    return max((_sequence(path, number) for number, path in _numbered(Path(folder))), default=-1) + 1


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a project, or None.

    Args:
        folder: The folder that they are in.
    """
    there = checkpoints(folder)
    return there[-1] if there else None


def prune(folder: str | Path, total_limit: int | None, committed: str | Path | None = None) -> list[Path]:
    """Delete the oldest checkpoints, once a new one is committed. Call it on one process per disk.

    What cannot be deleted is left, with a warning: the new checkpoint is there in any case.

    Args:
        folder: The folder that they are in.
        total_limit: How many stay, at least 1; None for all.
        committed: The checkpoint that was just committed; it stays, also if another run has committed since.

    Returns:
        The folders that were deleted.

    Raises:
        ValueError: If `total_limit` is below 1.
    """
    if total_limit is None:
        return []
    if total_limit < 1:
        raise ValueError(
            f"total_limit must be at least 1, or None to keep all checkpoints, not {total_limit!r}."
        )
    there = checkpoints(folder)
    complete = [path for path in there if manifest.is_complete(path)]
    # What another implementation left may be incomplete: it never takes the place of the newest complete one.
    kept = {path.name for path in complete[-1:]} | ({Path(committed).name} if committed else set())
    surplus = [path for path in there[: max(0, len(there) - total_limit)] if path.name not in kept]
    gone = [path for path in surplus if _delete(path)]
    recovery.sweep_folder(Path(folder))
    return gone


def _delete(path: Path) -> bool:
    aside = path.parent / f".{path.name}.replaced-{commit.new_token()}"
    try:
        os.rename(path, aside)  # so that a half-deleted folder is never found under the name
    except OSError as error:
        warn(f"total_limit: {path} cannot be deleted ({error}). Delete it yourself.", about="process")
        return False
    recovery.discard(aside)
    return True


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [(number, path) for path in root.iterdir() if (number := iteration_of(path.name)) is not None]


def _ordered(root: Path) -> list[tuple[int, int, Path]]:
    """The sequence, number and path of each checkpoint, in the order of the commits."""
    return sorted(
        (_sequence(path, number), number, path)
        for number, path in _numbered(root)
        if manifest.is_checkpoint(path)
    )


def _sequence(path: Path, number: int) -> int:
    try:
        described = manifest.read(path)
    except (CheckpointError, OSError):  # damaged: loading says so
        described = None
    found = described.facts.get("sequence") if described else None
    return found if isinstance(found, int) else number
