"""Reading a Slurm job: the run that an allocation's environment describes.

A process is in one of three places:

- a task of a step with one task per machine: each starts its machine's workers, as on several machines;
- a task of a step with several tasks per machine: each is a worker;
- the batch script, which runs on the first machine alone: srun starts a launcher on each.

A step of one task is a machine like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from accel_launch.errors import LaunchError
from accel_state.env import CPUInformation
from accel_state.process.slurm import tasks_on_machine

# Pseudo steps: the batch script, the external one and interactive shells run on one machine of the job.
_PSEUDO_STEPS = range(0xFFFFFFF0, 0x100000000)
_FIRST_PORT, _PORTS = 10000, 20000  # below those that the system assigns


@dataclass(frozen=True)
class Step:
    """The place of this process in a Slurm job.

    Args:
        role: A machine starts its workers, a worker is one, a batch script has to start launchers.
        nodes: Machines of the step; of the job in the batch script.
        node: Rank of this machine.
        place: Rank and size among the step's tasks, in all and on this machine.
        address: The first machine.
        port: A port for rank 0 that no other step or job will take; None for the default.
        cores: CPU cores per task, as requested; else this machine's cores divided by its tasks.
    """

    role: Literal["machine", "worker", "batch"]
    nodes: int
    node: int
    place: CPUInformation
    address: str
    port: int | None
    cores: int | None
    nodes_variable: str = "SLURM_STEP_NUM_NODES"
    list_variable: str = "SLURM_STEP_NODELIST"

    def values(self) -> dict[str, tuple[Any, str]]:
        """Return what this says about launch settings: each value with the variable that it came from."""
        found: dict[str, tuple[Any, str]] = {}
        if self.role in ("machine", "batch"):
            found = {
                "num_machines": (self.nodes, self.nodes_variable),
                "machine_rank": (self.node, "SLURM_NODEID"),
            }
        else:
            found["num_processes"] = (self.place.world_size, "SLURM_STEP_NUM_TASKS")
        found["main_process_ip"] = self.address, self.list_variable
        if self.port is not None:
            found["main_process_port"] = self.port, "SLURM_JOB_ID"
        return found


def find_step(environ: Mapping[str, str], address: str | None = None) -> Step | None:
    """Find the place of this process in a Slurm job.

    Args:
        environ: The environment.
        address: The first machine, if it is not that of Slurm's list.

    Returns:
        The place; None outside a job, on a job's only machine without several tasks, and in a worker that
        something else has started.

    Raises:
        LaunchError: If a variable of Slurm's is not what Slurm sets.
    """
    # With LOCAL_RANK this is a worker, whose launcher has followed the job.
    if not environ.get("SLURM_JOB_ID") or "LOCAL_RANK" in environ:
        return None
    if _number(environ, "SLURM_STEP_ID", _PSEUDO_STEPS[0]) in _PSEUDO_STEPS:
        return _find_batch(environ, address)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    # A step of one task is a program like any other.
    if tasks == 1:
        return None
    node = _number(environ, "SLURM_NODEID")
    local_size = _local_size(environ, node)
    return Step(
        # One task a machine: that task is a launcher. More: Slurm has started the workers itself.
        role="machine" if tasks == nodes else "worker",
        nodes=nodes,
        node=node,
        place=CPUInformation(
            _number(environ, "SLURM_PROCID"), tasks, _number(environ, "SLURM_LOCALID"), local_size
        ),
        # No name has to resolve on a single machine.
        address=address
        or ("127.0.0.1" if nodes == 1 else first_host(environ.get("SLURM_STEP_NODELIST", ""))),
        port=_port(environ),
        cores=_cores(environ, local_size),
    )


def _find_batch(environ: Mapping[str, str], address: str | None) -> Step | None:
    # Older versions of Slurm set the other one.
    variable = "SLURM_JOB_NUM_NODES" if environ.get("SLURM_JOB_NUM_NODES") else "SLURM_NNODES"
    nodes = _number(environ, variable, 1)
    if nodes == 1:
        return None
    address = address or first_host(environ.get("SLURM_JOB_NODELIST", ""))
    place = CPUInformation(0, 1, 0, 1)
    return Step("batch", nodes, 0, place, address, _port(environ), None, variable, "SLURM_JOB_NODELIST")


def step_to_follow(environ: Mapping[str, str], flag: Callable[[str], Any]) -> Step | None:
    """Return the place in a Slurm job that a run takes its settings from.

    Args:
        environ: The environment.
        flag: Returns the value of a setting's flag, None if it was not passed.

    Returns:
        The place; None outside a job, and where the flags request something else than the step is.

    Raises:
        LaunchError: If each task would start several processes.
    """
    step = find_step(environ, flag("main_process_ip"))
    launcher = flag("launcher") or ("mpirun" if flag("mpirun_hostfile") is not None else "auto")
    if step is None or flag("num_machines") not in (None, step.nodes):
        return None
    if flag("num_processes") == 1 and flag("num_machines") in (None, 1):
        return None  # one process is on one machine
    if step.role == "batch" and flag("machine_rank") is not None and launcher != "srun":
        # The user starts each machine. The others, reached by ssh, cannot compute this port.
        step = replace(step, role="machine", port=None)
    if step.role != "worker":
        follows = {"machine": ("auto", "torchrun"), "batch": ("auto", "srun")}[step.role]
        return step if launcher in follows else None
    requested, tasks = flag("num_processes"), step.place.world_size
    if launcher != "auto":
        return None
    if requested not in (None, tasks):
        raise LaunchError(
            f"--num_processes {requested}, but srun started {tasks} tasks on {step.nodes} machine(s), each "
            "one a process. Leave the flag out; or start one task per machine with `srun "
            "--ntasks-per-node=1`, whose launcher starts its machine's processes."
        )
    return step


def _port(environ: Mapping[str, str]) -> int:
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", 0)
    # All tasks compute the same port without talking to each other.
    return _FIRST_PORT + (job + (step if step not in _PSEUDO_STEPS else 0)) % _PORTS


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise LaunchError(
            f"{name}={text or '(not set)'} is not the number that Slurm sets. Start this with srun or "
            "sbatch, or unset SLURM_JOB_ID for a run outside of Slurm."
        )
    return int(text)


def _local_size(environ: Mapping[str, str], node: int) -> int:
    try:
        return tasks_on_machine(node, environ) or 1
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _cores(environ: Mapping[str, str], tasks: int) -> int | None:
    if environ.get("SLURM_CPUS_PER_TASK"):
        return _number(environ, "SLURM_CPUS_PER_TASK")
    on_node = environ.get("SLURM_CPUS_ON_NODE")
    return max(_number(environ, "SLURM_CPUS_ON_NODE") // tasks, 1) if on_node else None


def first_host(nodelist: str) -> str:
    """Return the first machine of a list as Slurm writes it.

    Args:
        nodelist: Such as `node[003-007,9],login1`.

    Raises:
        LaunchError: If it names none.
    """
    match = re.match(r"([^\[,\s]+)(?:\[(\d+)[^\]]*\]([^,\[\s]*))?", nodelist)
    if match is None:
        raise LaunchError(
            f"Slurm's list of machines is {nodelist!r}, which names none. Give --main_process_ip."
        )
    # The name before the bracket, the first number in it, and what follows it, as in rack[1-2]n1.
    return "".join(group for group in match.groups() if group)
