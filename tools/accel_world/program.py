"""A whole script as one rank of a world: what it computes is under test, and not how it is started."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import warnings
from unittest import mock

__all__ = ["run_program"]


def run_program(path: str, *args: str) -> str:
    """Run a script as `python path args` does; give it to `world.run` with init=False.

    Args:
        path: The script.
        *args: Its arguments.

    Returns:
        What this rank printed to stdout.
    """
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [path, *args]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.resetwarnings()  # those of a script, not of a test
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
