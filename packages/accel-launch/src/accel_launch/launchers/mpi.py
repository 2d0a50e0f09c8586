"""Start the workers with the mpirun of Open MPI, MPICH, Intel MPI or MVAPICH2.

mpirun gives each worker its rank under its own names, which accel reads; where rank 0 listens is given in
MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_launch.errors import LaunchError
from accel_launch.launchers.hostfile import read_hostfile
from accel_launch.local.ports import DEFAULT_PORT, reserve_port
from accel_launch.plan.plan import LauncherCommand
from accel_state import env

if TYPE_CHECKING:
    from accel_launch.plan.plan import LaunchPlan


def prepare(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the mpirun that starts the workers.

    Args:
        plan: What to start.
        base: This process's environment.

    Raises:
        LaunchError: If there is no mpirun, the port is in use, or the hostfile has too few slots.
    """
    port, port_socket = mpirun_port(plan)
    environ = mpirun_environment(plan, port)
    note = f"mpirun with {plan.settings.value('num_processes')} processes"
    return LauncherCommand(mpirun_command(plan, environ, base), environ, note, port_socket)


def mpirun_port(plan: LaunchPlan) -> tuple[int, socket.socket | None]:
    """Return the port of rank 0, and on one machine the socket that reserves it.

    Args:
        plan: What to start.

    Raises:
        LaunchError: If the port is in use on this machine and the run is on this machine alone.
    """
    port = plan.settings["main_process_port"]
    if plan.settings.value("mpirun_hostfile") is not None:
        return port.value or DEFAULT_PORT, None
    # Only where rank 0 is known to be on this machine.
    port_socket = reserve_port(port.value, port.detail if port.is_set else "")
    return port_socket.getsockname()[1], port_socket


def mpirun_environment(plan: LaunchPlan, port: int) -> dict[str, str]:
    """Return the environment of mpirun and, through it, of the workers.

    Args:
        plan: What to start.
        port: The port of rank 0.
    """
    hostfile = plan.settings.value("mpirun_hostfile")
    address = plan.settings.value("main_process_ip")
    environ = dict(plan.environ)
    if address is None:
        address = "127.0.0.1" if hostfile is None else read_hostfile(hostfile)[0].name
    env.put(environ, "MASTER_ADDR", address)
    env.put(environ, "MASTER_PORT", port)
    env.put(environ, "ACCELERATE_NUM_PROCESSES", plan.settings.value("num_processes"))
    # For oneCCL, Intel's backend; others do not read it.
    environ["CCL_WORKER_COUNT"] = str(plan.settings.value("mpirun_ccl"))
    return environ


def mpirun_command(plan: LaunchPlan, environ: Mapping[str, str], base: Mapping[str, str]) -> list[str]:
    """Return the command.

    Args:
        plan: What to start.
        environ: The workers' environment.
        base: This process's environment; what differs from it is passed on to other machines.

    Raises:
        LaunchError: If there is no mpirun, or the hostfile has fewer slots than there are processes.
    """
    import shutil

    # The workers' PATH, which may differ from this process's.
    program = shutil.which("mpirun", path=base.get("PATH"))
    if program is None:
        raise LaunchError("There is no mpirun on the PATH. Install Open MPI, MPICH or Intel MPI.")
    total = plan.settings.value("num_processes")
    hostfile = plan.settings.value("mpirun_hostfile")
    changed = sorted(name for name, text in environ.items() if base.get(name) != text)
    open_mpi = _is_open_mpi(program, base)
    command = [program, "-n", str(total)]
    if hostfile is not None:
        _check_slots(hostfile, total)
        command += ["--hostfile" if open_mpi else "-f", hostfile]
    elif open_mpi:
        command.append("--oversubscribe")  # it counts cores, and the number was requested
    # Of the others, only Hydra passes on the full environment itself.
    command += [word for name in changed for word in ("-x", name)] if open_mpi else []
    return [*command, *plan.command]


def _is_open_mpi(program: str, environ: Mapping[str, str]) -> bool:
    import subprocess

    found = subprocess.run(
        [program, "--version"], env=dict(environ), capture_output=True, text=True, check=False
    )
    # OpenRTE is the run-time layer of Open MPI up to version 4.
    return "Open MPI" in found.stdout or "OpenRTE" in found.stdout


def _check_slots(hostfile: str, total: int) -> None:
    hosts = read_hostfile(hostfile)
    if all(host.slots is not None for host in hosts):
        slots = sum(host.slots or 0 for host in hosts)
        if total > slots:
            raise LaunchError(
                f"num_processes={total}, but the hostfile {hostfile} has {slots} slots on {len(hosts)} "
                f"machines. Give --num_processes {slots}, or more slots."
            )
