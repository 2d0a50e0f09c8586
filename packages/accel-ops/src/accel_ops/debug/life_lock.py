"""Detecting that another process of this machine has ended, in whatever way.

Each process locks its own file, and the system releases the lock when the process ends. A missing answer of a
thread is not enough: its process may be busy outside Python.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile

try:
    import fcntl
except ImportError:  # on Windows nothing is detected
    fcntl = None  # type: ignore[assignment]


class LifeLock:
    """A file lock of this process, released when it ends; a fork does not inherit it.

    Attributes:
        name: What `has_ended` takes: this machine and the file.
    """

    def __init__(self) -> None:
        self._descriptor, self._path = tempfile.mkstemp(prefix="accel-process-")
        self.name = f"{socket.gethostname()}:{self._path}"
        if fcntl is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove the file: from now on has_ended returns False."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)


def has_ended(name: str) -> bool:
    """Return whether the process that made a lock has ended; if so, the lock's file is removed.

    Args:
        name: The name of another process's lock. For a process on another machine the result is False: on a
            shared file system locks may be local to each machine.
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
