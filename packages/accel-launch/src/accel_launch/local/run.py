"""Start the workers of one machine, supervise them, and stop them together.

Each worker has its own session, so Ctrl-C reaches only the launcher, which passes it on.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from accel_launch.local.failures.record import record_folder
from accel_launch.local.guard import Guard
from accel_launch.local.output.destinations import Output
from accel_launch.local.ports import reserve_port
from accel_launch.local.signals import SignalPipe
from accel_launch.local.supervisor import Member, Supervisor
from accel_launch.local.worker import Worker, adopt_orphans
from accel_launch.plan.environment import worker_environment
from accel_launch.plan.plan import LauncherCommand, LaunchPlan
from accel_state.env import CPUInformation


def run_local(plan: LaunchPlan) -> int:
    """Run the workers of one machine to their end.

    Args:
        plan: What to start.

    Returns:
        0, or the exit code of the worker that failed first; 128 + n if signal n ended it or the run. 75 if
        every worker ended with 75: they have saved their state, and can be resumed.

    Raises:
        LaunchError: If the port is in use.
    """
    # Before the first pipe is opened.
    _open_standard_streams()
    port = plan.settings["main_process_port"]
    with (
        reserve_port(port.value, port.detail if port.is_set else "") as port_socket,
        contextlib.closing(Guard()) as guard,
        SignalPipe() as signals,
        record_folder() as records,
    ):
        run = Supervisor(plan, Output.of(plan))
        # Before the first worker, which may start children and end at once.
        adopt_orphans(True)
        try:
            _start(run, guard, port_socket.getsockname()[1], records)
            run.loop(signals, guard.remove)
        finally:
            # Also after an error in the loop: no worker may be left behind.
            for member in run.members:
                member.worker.end()
            adopt_orphans(False)
        code = run.conclude()
    run.output.finish()
    return code


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return what rank 0 runs.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    port = plan.settings["main_process_port"]
    with reserve_port(port.value, port.detail if port.is_set else "") as port_socket:
        environ = _worker_environment(plan, 0, port_socket.getsockname()[1])
    return LauncherCommand(
        plan.command, environ, f"{plan.processes} processes on this machine; of these, rank 0:"
    )


def _worker_environment(plan: LaunchPlan, rank: int, port: int) -> dict[str, str]:
    place = CPUInformation(rank, plan.processes, rank, plan.processes)
    return worker_environment(plan.environ, place, "127.0.0.1", port)


def _open_standard_streams() -> None:
    """Open closed standard streams (`2>&-`), or a pipe gets their number and with it workers' output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _start(run: Supervisor, guard: Guard, port: int, records: Path | None) -> None:
    for rank in range(run.plan.processes):
        environ = _worker_environment(run.plan, rank, port)
        record = records and records / f"{rank}.json"
        channel = run.output.open(rank, record)
        try:
            worker = Worker(
                rank,
                run.plan.command,
                run.output.environment(environ),
                # Only one: several would take each other's input.
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=channel.stdout,
                stderr=channel.stderr,
                record=record,
            )
        finally:
            channel.close_writing()
        # As soon as it exists; until then the worker's own request to the kernel covers it (Linux).
        guard.add(worker.pid)
        run.members.append(Member(worker, channel.streams))
