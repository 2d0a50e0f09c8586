"""A worker process as the test process sees it: start, output, stack, end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from accel_world.leaks import own_children
from accel_world.messages import Setup
from accel_world.report import WorldFailure, describe_exit

__all__ = ["Worker", "base_environment"]

START_S = 120.0  # importing torch on a loaded machine
BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
from accel_world.worker import main
main(int(sys.argv[1]))
"""
# Traces of a launcher, which would tell a worker that it is part of another run.
LAUNCHER_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "MEGATRON_LM_",
    "MV2_",
    "OMPI_",
    "PARALLELISM_CONFIG_",
    "PMI_",
    "TORCHELASTIC_",
)
LAUNCHER_VARIABLES = frozenset(
    {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
)


class Worker:
    """One worker process and the test process's end of the socket pair."""

    def __init__(self, folder: Path, index: int) -> None:
        """Start the process; `wait_ready` later waits for its import of torch."""
        self.output_file = folder / f"{index}.out"
        self.stack_file = folder / f"{index}.stack"
        self._ready = False
        self._read_to = 0
        ours, theirs = socket.socketpair()
        with theirs, self.output_file.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(theirs.fileno()), str(Path(__file__).parents[1])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=base_environment(),
                start_new_session=True,
            )
        own_children.add(self.process.pid)
        self.connection = Connection(ours.detach())
        self.connection.send_bytes(pickle.dumps(Setup(os.getpid(), sys.path, str(self.stack_file))))

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the worker has imported torch.

        Raises:
            WorldFailure: If it does not come up.
        """
        if self._ready:
            return
        with contextlib.suppress(EOFError, ConnectionResetError):
            self._ready = self.connection.poll(START_S) and self.connection.recv_bytes() == b"ready"
        if not self._ready:
            self.kill()
            raise WorldFailure(
                f"A worker did not start ({describe_exit(self.process.returncode)}):\n{self.new_output()}"
            )

    def new_output(self) -> str:
        """Return what the worker has printed since the last call."""
        with self.output_file.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        self._read_to += len(data)
        return data.decode(errors="replace")

    def stack(self) -> str:
        """Return the Python stack of each of its threads, as it stands now."""
        try:
            self.process.send_signal(signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        until = time.monotonic() + 2.0
        text = previous = ""
        while time.monotonic() < until and (not text or text != previous):
            time.sleep(0.05)
            previous, text = text, self.stack_file.read_text(errors="replace")
        return text or "(no stack: the process does not answer signals)"

    def kill(self) -> None:
        """End the worker and everything in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        own_children.discard(self.process.pid)
        self.connection.close()


def base_environment() -> dict[str, str]:
    """Return this environment without any launcher's traces, one thread each, gloo on loopback."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(LAUNCHER_PREFIXES) and key not in LAUNCHER_VARIABLES
    }
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return environment | {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
