"""Output paths: runs of `accel verify` write to a temporary folder instead of the user's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from accel_state import env
from accel_state.logging.warning import warn

_P = TypeVar("_P")  # str, a path, or None


def is_verifying() -> bool:
    """Return whether `accel verify` has started this process."""
    return env.is_set("ACCELERATE_VERIFY_FOLDER")


def output_path(path: _P) -> _P:
    """Return the path to write to: the user's, or under `accel verify` one in its temporary folder.

    Args:
        path: The user's path; None stays None.

    Returns:
        The user's path. Under `accel verify` the same path below the temporary folder, whose parent exists; a
        folder if the user's path is one.
    """
    user_path: Any = path
    if user_path is None or not is_verifying():
        return path
    root = Path(os.path.realpath(env.get("ACCELERATE_VERIFY_FOLDER"))) / "files"
    # realpath: a path inside the temporary folder stays unchanged.
    real_path = Path(os.path.realpath(user_path))
    if not real_path.is_relative_to(root):
        real_path = root.joinpath(*real_path.parts[1:])  # without the root, or the drive
    (real_path if os.path.isdir(user_path) else real_path.parent).mkdir(parents=True, exist_ok=True)
    return str(real_path) if isinstance(user_path, str) else real_path  # type: ignore[return-value]


def warn_without_checkpoint(function: str) -> None:
    """Warn that a function loads nothing, since this run of `accel verify` has saved nothing there.

    Args:
        function: Its name.
    """
    warn(f"{function} restores nothing: under `accel verify` a script starts without a checkpoint.")
