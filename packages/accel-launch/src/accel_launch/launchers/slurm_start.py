"""Starting under Slurm: a task becomes a worker, and a batch script starts a launcher on each machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from accel_launch.errors import LaunchError
from accel_launch.plan.environment import worker_environment
from accel_launch.plan.plan import LauncherCommand, LaunchPlan
from accel_launch.plan.relaunch import accel_launch_command


def prepare_task(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the worker that this task becomes.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    step = plan.settings.slurm
    assert step is not None, "the plan says that this is a task"
    environ = worker_environment(
        plan.environ,
        step.place,
        plan.settings.value("main_process_ip"),
        plan.settings.value("main_process_port"),
        machine=(step.node, step.nodes),
    )
    # What Slurm has given to a task, unless the user has set another number.
    if step.cores is not None:
        environ.setdefault("OMP_NUM_THREADS", str(step.cores))
    place = f"task {step.place.rank} of {step.place.world_size}"
    return LauncherCommand(
        plan.command, environ, f"{place} of Slurm job {base['SLURM_JOB_ID']}, in place of this one"
    )


def prepare_srun(plan: LaunchPlan, base: Mapping[str, str]) -> LauncherCommand:
    """Return the srun that starts a launcher on each machine; outside a job it requests one.

    Args:
        plan: What to start.
        base: This process's environment.
    """
    nodes = plan.machines[1]
    command = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpu-bind=none",  # a launcher's workers may use all cores of the job
        "--kill-on-bad-exit=1",
        *accel_launch_command(plan, without=("launcher", "num_machines", "machine_rank")),
    ]

    def check() -> None:
        if shutil.which("srun") is None:
            found = plan.settings["num_machines"]
            raise LaunchError(
                f"There is no srun on the PATH, which would start a launcher on each of {nodes} machines "
                f"(num_machines={nodes} from {found.detail}). Run this where Slurm's commands are installed; "
                "give --num_machines 1 for a run on this machine alone; or run accel launch on each machine, "
                f"with --num_machines {nodes}, --machine_rank 0 to {nodes - 1}, and machine 0's address as "
                "--main_process_ip."
            )

    note = f"srun with a launcher on each of {nodes} machines"
    return LauncherCommand(command, dict(base), note, wait=check)
