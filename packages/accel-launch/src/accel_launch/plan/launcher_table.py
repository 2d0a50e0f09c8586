"""Programs that start the workers: the table of launchers, and the choice among them.

A launcher is a function of the plan and this process's environment that returns the program to become; one
that supervises the workers itself has a second function, which runs them to their end.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from accel_launch.errors import LaunchError
from accel_launch.local.system import require_posix
from accel_launch.plan.plan import LauncherCommand, LauncherName
from accel_launch.settings.resolve import Settings, Source
from accel_launch.settings.schema import SETTINGS


@dataclass(frozen=True)
class Launcher:
    """An entry of the table.

    Args:
        what: Its name in messages.
        prepare: `module:function` that takes a Plan and an environment and returns a Prepared.
        run: `module:function` that takes a Plan, runs the workers and returns the exit code; empty for a
            program that takes this process's place.
        unused: Flags that it ignores.
    """

    what: str
    prepare: str
    run: str = ""
    unused: tuple[str, ...] = ()

    def load(self, function: str) -> Callable[..., Any]:
        """Return one of its functions.

        Args:
            function: prepare or run.
        """
        module, _, name = getattr(self, function).partition(":")
        # Imported when it is chosen: most runs need one of the nine.
        loaded: Callable[..., Any] = getattr(import_module(module), name)
        return loaded


def exec_launcher(prepared: LauncherCommand) -> NoReturn:
    """Replace this process with the launcher program, after flushing its output.

    Args:
        prepared: The program.

    Raises:
        LaunchError: If it is not there, or on Windows, where a program cannot replace another.
    """
    require_posix(f"Running {prepared.command[0]} in place of this program", "Run it yourself.")
    # exec does not write buffered output.
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):  # an ignored signal would stay so
        signal.signal(ignored_by_python, signal.SIG_DFL)
    if prepared.port_socket is not None:
        prepared.port_socket.set_inheritable(True)  # stays reserved until the program ends
    program = prepared.command[0]
    try:
        # exec and no child: signals, the terminal and the exit code are the program's own.
        os.execvpe(program, list(prepared.command), dict(prepared.environ))
    except FileNotFoundError:
        raise LaunchError(f"There is no program {program!r} on the PATH.") from None


LAUNCHERS: dict[LauncherName, Launcher] = {
    "exec": Launcher(
        "one process",
        "accel_launch.local.single:prepare",
        # With a log, one process is chosen for TPUs alone.
        unused=("tee", "log_dir", "role", "grace_period", "monitor_interval", "mpirun_ccl"),
    ),
    "local": Launcher(
        "workers of this machine",
        "accel_launch.local.run:prepare",
        "accel_launch.local.run:run_local",
        unused=("monitor_interval", "mpirun_hostfile", "mpirun_ccl"),
    ),
    "torchrun": Launcher(
        "torchrun",
        "accel_launch.launchers.torchrun:prepare",
        unused=("grace_period", "quiet", "mpirun_hostfile", "mpirun_ccl"),
    ),
    "mpirun": Launcher(
        "mpirun",
        "accel_launch.launchers.mpi:prepare",
        unused=("grace_period", "quiet", "monitor_interval", "tee", "log_dir", "role"),
    ),
    "task": Launcher(
        "a task of Slurm",
        "accel_launch.launchers.slurm_start:prepare_task",
        unused=("tee", "log_dir", "role", "grace_period", "monitor_interval", "mpirun_ccl"),
    ),
    "srun": Launcher("srun", "accel_launch.launchers.slurm_start:prepare_srun"),
    "deepspeed": Launcher(
        "DeepSpeed's launcher",
        "accel_launch.launchers.deepspeed:prepare",
        unused=("tee", "log_dir", "role", "grace_period", "monitor_interval", "mpirun_ccl"),
    ),
    "ray": Launcher(
        "Ray",
        "accel_launch.launchers.ray.cluster:prepare",
        "accel_launch.launchers.ray.cluster:run",
        unused=(
            *("gpu_ids", "main_process_ip", "machine_rank", "monitor_interval"),
            *("mpirun_hostfile", "mpirun_ccl", "deepspeed_hostfile", "deepspeed_multinode_launcher"),
            *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
        ),
    ),
    "pod": Launcher("a TPU pod", "accel_launch.launchers.tpu.pod:prepare"),
}
"""Every launcher by its name."""


def choose_remote_launcher(settings: Settings) -> LauncherName | None:
    """Choose a launcher that does not depend on this machine's devices.

    Args:
        settings: The effective settings.

    Returns:
        The launcher; None if the workers are this machine's.
    """
    if settings.value("launcher") == "ray":
        needed = [name for name in _reasons_for_torchrun(settings) if name != "rdzv_conf"]
        _check_supported(
            "Ray, which places the workers itself,",
            [*needed, *(["tpu"] if settings.value("tpu") else [])],
            settings,
        )
        return "ray"
    if settings.value("tpu") and settings.value("tpu_cluster"):
        return "pod"
    # Before Slurm: a hostfile, or a launcher of DeepSpeed's, was requested.
    if settings.value("use_deepspeed"):
        from accel_launch.launchers.deepspeed import is_needed

        if is_needed(settings):
            return "deepspeed"
    role = settings.slurm.role if settings.slurm is not None else None
    if settings.value("launcher") == "srun" or role == "batch":
        return "srun"
    return "task" if role == "worker" else None


def choose_here(settings: Settings) -> LauncherName:
    """Choose what starts this machine's workers.

    Args:
        settings: The effective settings, the number of processes included.

    Raises:
        LaunchError: If the requested launcher does not support the settings.
    """
    launcher = settings.value("launcher")
    reasons = _reasons_for_torchrun(settings)
    if launcher == "mpirun" or (launcher == "auto" and settings.value("mpirun_hostfile") is not None):
        # The hostfile says how many machines there are.
        _check_supported("mpirun", [name for name in reasons if name != "num_machines"], settings)
        return "mpirun"
    if settings.value("tpu"):  # torch_xla starts this machine's processes
        needed = [*reasons, *(["launcher"] if launcher != "auto" else [])]
        _check_supported("--tpu", needed, settings)
        return "exec"
    if launcher == "local":
        _check_supported("--launcher local", reasons, settings)
        return "local"
    if launcher == "torchrun" or reasons:
        return "torchrun"
    logs = settings.value("tee") != "0" or settings.value("log_dir") is not None
    return "local" if settings.value("num_processes") > 1 or logs else "exec"


def _reasons_for_torchrun(settings: Settings) -> list[str]:
    """Return the settings that need torchrun."""
    needed = {
        "num_machines": settings.value("num_machines") != 1,
        "max_restarts": settings.value("max_restarts") > 0,
        # A detected one has a reason that is listed here too.
        "rdzv_backend": settings.is_set("rdzv_backend") and settings.value("rdzv_backend") != "static",
        "rdzv_conf": bool(settings.value("rdzv_conf")),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def _check_supported(what: str, names: list[str], settings: Settings) -> None:
    if names:
        unsupported = ", ".join(f"{name}={settings.value(name)}" for name in names)
        remedy = "leave that out" if settings.value("tpu") else "leave that out, or give --launcher torchrun"
        raise LaunchError(f"{what} does not support {unsupported}; {remedy}.")


def warn_unused(settings: Settings, name: LauncherName) -> None:
    """Warn about flags that the launcher ignores.

    Args:
        settings: The effective settings.
        name: The launcher.
    """
    launcher = LAUNCHERS[name]
    flags = [SETTINGS[key].flag for key in launcher.unused if settings[key].source == Source.FLAG]
    if flags:
        warnings.warn(f"Ignored for {launcher.what}: {', '.join(flags)}.", UserWarning, stacklevel=4)
