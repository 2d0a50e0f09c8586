"""Noticing that another process of this machine has ended, however it did.

Each process holds a lock on a file of its own, which the system releases when the process ends. A thread that
answers could not say as much: it may wait for a process that is busy outside Python.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile

try:
    import fcntl
except ImportError:  # on Windows nothing is noticed
    fcntl = None  # type: ignore[assignment]


class LifeLock:
    """A lock that this process holds until it ends; a process that it forks does not hold it.

    Attributes:
        name: What `has_ended` takes: this machine and the file.
    """

    def __init__(self) -> None:
        self._descriptor, self._path = tempfile.mkstemp(prefix="accel-process-")
        self.name = f"{socket.gethostname()}:{self._path}"
        if fcntl is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove the file: from now on nobody can tell whether the process has ended."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)


def has_ended(name: str) -> bool:
    """Return whether the process that made a lock has ended; if so, the lock's file is removed.

    Args:
        name: That of another process's lock. Of a process on another machine nothing is known: a file system
            that machines share may keep locks on each machine alone.
    """
    machine, _, path = name.partition(":")
    if fcntl is None or machine != socket.gethostname():
        return False
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return True
