"""Automatically named checkpoints: listing them, finding the newest, and deleting old ones.

They are ordered by commit. Each commit writes a sequence number into its manifest, one above all others in
the folder. A checkpoint without one (of an earlier version, or another implementation) uses the number in its
name.
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
        folder: The folder that contains them (`<project_dir>/checkpoints`).
    """
    return [path for _, _, path in _ordered(Path(folder))]


def next_number(folder: str | Path) -> int:
    """Return the lowest number above all names `checkpoint_<number>` in a folder, complete or not.

    Args:
        folder: The folder of the checkpoints; it need not exist.
    """
    # Above the highest, not their count: some in between may have been deleted.
    return max((number for number, _ in _numbered(Path(folder))), default=-1) + 1


def next_sequence(folder: str | Path) -> int:
    """Return the sequence number of the next commit.

    Args:
        folder: The folder of the checkpoints; it need not exist.
    """
    return max((_sequence(path, number) for number, path in _numbered(Path(folder))), default=-1) + 1


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a project, or None.

    Args:
        folder: The folder that contains them.
    """
    existing = checkpoints(folder)
    return existing[-1] if existing else None


def prune(folder: str | Path, total_limit: int | None, committed: str | Path | None = None) -> list[Path]:
    """Delete the oldest checkpoints, once a new one is committed. Call it on one process per disk.

    If one cannot be deleted, a warning says so: the new checkpoint exists in any case.

    Args:
        folder: The folder that contains them.
        total_limit: How many to keep, at least 1; None for all.
        committed: The checkpoint that was just committed; it is kept even if another run has committed since.

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
    existing = checkpoints(folder)
    complete = [path for path in existing if manifest.is_complete(path)]
    # One of another implementation may be incomplete: it never replaces the newest complete one.
    kept_names = {path.name for path in complete[-1:]} | ({Path(committed).name} if committed else set())
    surplus = [
        path for path in existing[: max(0, len(existing) - total_limit)] if path.name not in kept_names
    ]
    deleted = [path for path in surplus if _delete(path)]
    recovery.sweep_folder(Path(folder))
    return deleted


def _delete(path: Path) -> bool:
    replaced = path.parent / f".{path.name}.replaced-{commit.new_token()}"
    try:
        os.rename(path, replaced)  # so that a half-deleted folder never has the name
    except OSError as error:
        warn(f"total_limit: {path} cannot be deleted ({error}). Delete it yourself.", about="process")
        return False
    recovery.discard(replaced)
    return True


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [(number, path) for path in root.iterdir() if (number := iteration_of(path.name)) is not None]


def _ordered(root: Path) -> list[tuple[int, int, Path]]:
    """Return the sequence, number and path of each checkpoint, in the order of the commits."""
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
    sequence = described.facts.get("sequence") if described else None
    return sequence if isinstance(sequence, int) else number
