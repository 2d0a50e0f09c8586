"""A full script as one rank of a world: what it computes is under test, and not how it is started."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

__all__ = ["run_program"]


def run_program(path: str, *args: str) -> str:
    """Run a script as `python path args` does; give it to `world.run` with init=False.

    Its folder is first on sys.path meanwhile. What it imports stays imported, unlike there.

    Args:
        path: The script.
        *args: Its arguments.

    Returns:
        What this rank printed to stdout.

    Raises:
        SystemExit: If it exits with another code than 0.
    """
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [path, *args]),
        mock.patch.object(sys, "path", [str(Path(path).resolve().parent), *sys.path]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.resetwarnings()  # those of a script, not of a test
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    return printed.getvalue()
