"""The starter and the workers as the test process sees them."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from accel_world.environment import base_environment
from accel_world.leaks import own_children
from accel_world.messages import Setup
from accel_world.report import WorldFailure, describe_exit
from accel_world.starter import MESSAGE_BYTES, Reap, Start

__all__ = ["Starter", "Worker"]

START_S = 120.0  # importing torch on a loaded machine
BOOT = """
import sys
sys.path.insert(0, sys.argv[3])
from accel_world.starter import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class Starter:
    """The process that forks the workers; it ends with this one."""

    def __init__(self, folder: Path) -> None:
        """Start the process and do not wait: it imports torch meanwhile."""
        self._output_file = folder / "starter.out"
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        with theirs, self._output_file.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-c", BOOT, str(theirs.fileno()), str(os.getpid()), str(Path(__file__).parents[1])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=base_environment(),
                start_new_session=True,
            )
        own_children.add(self._process.pid)

    def start(self, setup: Setup, connection: int, output: int) -> int:
        """Fork a worker and return its process id."""
        return int(self._ask(Start(setup), [connection, output]))

    def reap(self, pid: int) -> int:
        """Wait for the end of a worker and return its exit code, negative for a signal."""
        return int(self._ask(Reap(pid), []))

    def close(self) -> None:
        """End the starter; its workers end with it."""
        self._process.kill()
        self._process.wait()
        self._control.close()
        own_children.discard(self._process.pid)

    def _ask(self, request: Start | Reap, descriptors: list[int]) -> Any:
        try:
            if not self._ready:
                self._ready = bool(self._answer())
            socket.send_fds(self._control, [pickle.dumps(request)], descriptors)
            return self._answer()
        except (OSError, EOFError) as error:
            code = describe_exit(self._process.poll())
            output = self._output_file.read_text(errors="replace")
            raise WorldFailure(f"The workers' starter does not answer ({code}):\n{output}") from error

    def _answer(self) -> Any:
        message = self._control.recv(MESSAGE_BYTES)
        if not message:
            raise EOFError
        return pickle.loads(message)


class Worker:
    """One worker process, and the test process's end of the socket pair."""

    def __init__(self, starter: Starter, folder: Path, index: int) -> None:
        """Fork the process; its output and its stacks go to separate files."""
        self._starter = starter
        self._output_file = folder / f"{index}.out"
        self._stack_file = folder / f"{index}.stack"
        self._read_to = 0
        self.returncode: int | None = None  # set once it is killed
        ours, theirs = socket.socketpair()
        with theirs, self._output_file.open("ab") as output:
            setup = Setup(list(sys.path), str(self._stack_file))
            self.pid = starter.start(setup, theirs.fileno(), output.fileno())
        self.connection = Connection(ours.detach())
        self.end = os.pidfd_open(self.pid)  # becomes readable when the process ends

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.returncode is None and not select.select([self.end], [], [], 0)[0]

    def new_output(self) -> str:
        """Return what the worker has printed since the last call."""
        with self._output_file.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        self._read_to += len(data)
        return data.decode(errors="replace")

    def stack(self) -> str:
        """Return the Python stack of each of its threads and of its children's, as they stand now."""
        if not self.alive:
            return ""
        text = self._stack_of(self.pid) or "(no stack: the process does not answer signals)"
        for child in _children(self.pid):  # loaders' workers, say: forked with the handler and its file
            text += f"\nchild process {child}:\n"
            text += self._stack_of(child) or "(no stack: it does not answer signals, or is another program)"
        return text

    def _stack_of(self, pid: int) -> str:
        """What a process writes into the worker's stack file on request."""
        start = self._stack_file.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + 10.0  # on a busy machine
        text = previous = b""
        while time.monotonic() < until and (not text or text != previous):
            time.sleep(0.05)
            previous, text = text, self._stack_file.read_bytes()[start:]
        return text.decode(errors="replace")

    def kill(self) -> None:
        """End the worker and everything in its process group."""
        if self.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._starter.reap(self.pid)
        self.connection.close()
        os.close(self.end)


def _children(pid: int) -> list[int]:
    """The child processes of a process; none on systems that do not list them (not Linux)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = file.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                found.append(int(file.parent.name))
    return found
