"""How the processes of the tests start the workers of loaders."""

from __future__ import annotations

import multiprocessing
import sys

__all__ = ["fork_by_default"]


def fork_by_default() -> None:
    """Fork them on Linux under Python 3.14 too, whose default is a server that imports what it runs.

    It could not import the files of tests. Tests of other start methods run scripts.
    """
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)
