"""Check that the operating system can start workers."""

from __future__ import annotations

import sys

from accel_launch.errors import LaunchError


def require_posix(what: str, instead: str) -> None:
    """Raise an error on Windows.

    Args:
        what: The feature that does not work on it.
        instead: Alternatives, in sentences.

    Raises:
        LaunchError: On Windows.
    """
    if sys.platform == "win32":
        raise LaunchError(
            f"{what} does not work on Windows: it needs fork, process groups and signals of POSIX. {instead} "
            "Under WSL, the Windows Subsystem for Linux, it works."
        )
