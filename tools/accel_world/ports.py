"""TCP ports that no other test on this machine uses."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["lease_port"]

# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection takes one.
FIRST, LAST = 20000, 32000


@contextmanager
def lease_port() -> Iterator[int]:
    """Yield a free port on 127.0.0.1, reserved by a lock file until the block ends.

    Raises:
        RuntimeError: If every port of the range is taken.
    """
    folder = Path(tempfile.gettempdir()) / f"accel-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    start = random.Random(os.urandom(8)).randrange(FIRST, LAST)
    for offset in range(LAST - FIRST):
        port = FIRST + (start - FIRST + offset) % (LAST - FIRST)
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            if _locked(lock) and _free(port):
                yield port
                return
        finally:
            os.close(lock)
    raise RuntimeError(f"no free port between {FIRST} and {LAST} on 127.0.0.1")


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
