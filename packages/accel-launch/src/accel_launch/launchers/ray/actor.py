"""The actor that stands for one worker on a machine of a Ray cluster: it runs the worker as a process.

Ray imports this module on each machine. The actor ends with its driver, however that one went, and the
worker's process group with the actor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_launch.launchers.network import set_gloo_interface
from accel_launch.local.failures.record import Raised, record_folder
from accel_launch.local.guard import Guard
from accel_launch.local.ports import reserve_port
from accel_launch.local.signals import ENDING
from accel_launch.local.worker import Worker, adopt_orphans
from accel_state import env

_CHUNK = 32768
# Signals reach the main thread alone, and this runs in another: the end is polled for.
_LOOK_S = 0.05
_DRAIN_READS = 64  # more than a pipe holds; a child of the worker may still be writing to it

Event = tuple[str, bytes | int | Raised]
"""("1" or "2", what came on that stream), ("raised", its exception), or ("end", the exit code)."""


@dataclass(frozen=True)
class ActorPlace:
    """Where Ray put an actor.

    Args:
        node: Ray's id of the machine.
        address: The machine's address in the cluster.
        host: Its host name.
        gpus: The GPUs that Ray set apart for the actor.
    """

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]


class RayWorker:
    """One worker. `run` takes one thread of the actor, so that `send` can be called meanwhile."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._worker: Worker | None = None

    def place(self) -> ActorPlace:
        """Return where this is."""
        ray: Any = import_module("ray")
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        address = ray.util.get_node_ip_address()
        return ActorPlace(context.get_node_id(), address, socket.gethostname(), tuple(map(str, gpus)))

    def reserve(self, port: int | None, source: str) -> int:
        """Reserve the port that rank 0 will listen on, until the actor ends.

        Args:
            port: The port; a free one if None or 0.
            source: What requested it, for the error.

        Raises:
            LaunchError: If it is in use.
        """
        self._port_socket = reserve_port(port, source)
        return int(self._port_socket.getsockname()[1])

    def run(
        self,
        command: Sequence[str],
        changes: Mapping[str, str],
        folder: str,
        python: str,
        address: str | None = None,
    ) -> Iterator[Event]:
        """Run the worker to its end.

        Args:
            command: What it runs.
            changes: Its environment, as far as it is not this machine's.
            folder: The working directory; the actor's own where this machine does not have it.
            python: The launcher's Python, in whose place this machine's is taken.
            address: This machine's address, where there are others.

        Yields:
            Its output as it comes, then its exit code; it continues until nothing of its group is left.
        """
        # The launcher's Python may have another path on that machine.
        command = [sys.executable if command[0] == python else command[0], *command[1:]]
        readers: dict[int, str] = {}
        # Ray kills an actor's children with it.
        with contextlib.closing(Guard(detached=True)) as guard, record_folder() as records:
            adopt_orphans(True)
            try:
                try:
                    environ = _environment(changes, address)
                    record = records and records / "error.json"
                    self._worker = _begin(command, environ, folder, readers, record)
                except OSError as error:
                    yield "2", f"{command[0]}: {error.strerror}\n".encode()
                    yield "end", 127
                    return
                finally:
                    self._started.set()
                guard.add(self._worker.pid)
                yield from _follow(self._worker, readers)
                guard.remove(self._worker.pid)
            finally:
                adopt_orphans(False)
                for reading in readers:
                    os.close(reading)

    def send(self, number: int, group: bool) -> None:
        """Send a signal to the worker, as soon as it has been started.

        Args:
            number: The signal.
            group: Whether everything that the worker started gets it too.
        """
        # A signal may be sent before the worker is there, as calls of an actor run side by side.
        self._started.wait()
        if self._worker is not None:
            (self._worker.signal_group if group else self._worker.signal)(number)


def _begin(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: str,
    readers: dict[int, str],
    record: Path | None,
) -> Worker:
    """Start the worker; add the reading ends of its streams to `readers`, even if it cannot be started."""
    writers = []
    try:
        for stream in ("1", "2"):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            readers[reading] = stream
            writers.append(writing)
        return Worker(
            0,
            command,
            environ,
            stdin=subprocess.DEVNULL,
            stdout=writers[0],
            stderr=writers[1],
            folder=folder if os.path.isdir(folder) else None,
            heed=ENDING,  # a cluster that was started in the background ignores Ctrl-C
            record=record,
        )
    finally:
        for writing in writers:
            os.close(writing)


def _environment(changes: Mapping[str, str], address: str | None) -> dict[str, str]:
    environ = {**env.snapshot(), **changes}
    set_gloo_interface(environ, address)
    return environ


def _follow(worker: Worker, readers: dict[int, str]) -> Iterator[Event]:
    """Pass on output until nothing of the worker's group is left."""
    poll = select.poll()
    for reading in readers:
        poll.register(reading, select.POLLIN)
    while not worker.gone:
        for reading, _ in poll.poll(_LOOK_S * 1000):
            data = os.read(reading, _CHUNK)
            if data:
                yield readers[reading], data
            else:
                poll.unregister(reading)
                os.close(reading)
                del readers[reading]
        ended = worker.reap()
        if ended or worker.gone:
            for reading, stream in readers.items():
                for _ in range(_DRAIN_READS):
                    data = _read(reading)
                    if not data:
                        break
                    yield stream, data
        if ended:
            if worker.raised is not None:
                yield "raised", worker.raised
            yield "end", int(worker.returncode or 0)


def _read(reading: int) -> bytes:
    """Return what is there now."""
    try:
        return os.read(reading, _CHUNK)
    except BlockingIOError:
        return b""
