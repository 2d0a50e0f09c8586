"""Automatically named checkpoints: which there are, which is the newest, and how old ones go."""

from __future__ import annotations

import os
from pathlib import Path

from accel_ckpt import commit, manifest, recovery
from accel_ckpt.layout import iteration_of, role_of

__all__ = ["checkpoints", "latest", "prune"]


def checkpoints(folder: str | Path) -> list[Path]:
    """List the complete checkpoints of a project, oldest first.

    A folder counts if it has a manifest, or the files of another implementation.

    Args:
        folder: The folder that they are in (`<project_dir>/checkpoints`).
    """
    root = Path(folder)
    if not root.is_dir():
        return []
    numbered = [(number, path) for path in root.iterdir() if (number := iteration_of(path.name)) is not None]
    return [path for _, path in sorted(numbered) if _holds_checkpoint(path)]


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a project, or None.

    Args:
        folder: The folder that they are in.
    """
    there = checkpoints(folder)
    return there[-1] if there else None


def prune(folder: str | Path, total_limit: int | None) -> list[Path]:
    """Delete the oldest checkpoints, once a new one is committed. Call it on one process per disk.

    Args:
        folder: The folder that they are in.
        total_limit: How many stay, at least 1; None for all.

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
    surplus = [path for path in there[: max(0, len(there) - total_limit)] if path not in complete[-1:]]
    for path in surplus:
        aside = path.parent / f".{path.name}.replaced-{commit.new_token()}"
        os.rename(path, aside)  # so that a half-deleted folder is never found under the name
        recovery.discard(aside)
    recovery.sweep_folder(Path(folder))
    return surplus


def _holds_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        return False
    return manifest.is_complete(path) or any(role_of(child.name) != "other" for child in path.iterdir())
