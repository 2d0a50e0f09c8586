"""A process that ends the launched runs of a pytest process which was killed before it could."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_world import marked
from accel_world.leaks import own_children

__all__ = ["Guard", "main"]

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from accel_world.guard import main; main()"


class Guard:
    """The pytest process's end: tells the guard which runs are active. Starts with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def watch(self, mark: str) -> Iterator[None]:
        """Have the run with this mark ended if this process dies within the block."""
        self._tell(f"+{mark}")
        yield
        self._tell(f"-{mark}")

    def close(self) -> None:
        """End the guard."""
        if self._process is not None:
            self._process.communicate()
            own_children.discard(self._process.pid)

    def _tell(self, line: str) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", BOOT, str(Path(__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is not for it
            )
            own_children.add(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def main() -> None:
    """Read which runs begin (+mark) and end (-mark) until the pytest process is gone; end those left."""
    going_on = set()
    for line in sys.stdin:
        mark = line.strip()[1:]
        if line.startswith("+"):
            going_on.add(mark)
        else:
            going_on.discard(mark)
    for mark in going_on:
        marked.end(mark, patience_s=0)
