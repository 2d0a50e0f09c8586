"""From settings to a plan: launcher, number of processes, command and environment."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

from accel_launch.errors import LaunchError
from accel_launch.plan.environment import common_environment, without_worker_variables
from accel_launch.plan.launcher_table import choose_here, choose_remote_launcher, warn_unused
from accel_launch.plan.machine import Machine
from accel_launch.plan.plan import LaunchPlan
from accel_launch.plan.script import worker_command
from accel_launch.settings.resolve import Effective, Settings, Source


def make_plan(
    settings: Settings,
    script: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    machine: Machine | None = None,
) -> LaunchPlan:
    """Decide what to start, and check that it can work before anything is started.

    Args:
        settings: The effective settings.
        script: The script, module or program.
        arguments: Its arguments.
        environ: The environment that workers inherit.
        machine: This machine's processors; detected by default.

    Returns:
        The plan.

    Raises:
        LaunchError: If the script does not exist, or counts, devices and machines do not fit together.
    """
    command = worker_command(settings, script, arguments, environ)
    launcher = choose_remote_launcher(settings)
    if launcher is not None:  # this machine's devices do not matter
        if settings.is_set("num_processes"):
            _check_mesh(settings)
            if launcher == "srun":  # or each of the launchers would say it
                _per_machine(settings, 0, 0)
        # 0: their number here is decided elsewhere.
        mask, processes, machines = None, 0, _machine_range(settings)
    else:
        machine = machine or Machine.detect()
        # This order: the mask decides how many GPUs are visible, and they how many processes there are.
        settings = _choose_rendezvous(settings)
        machines = _machines(settings)
        mask = _gpu_mask(settings, machine)
        visible = mask if mask is not None else environ.get("CUDA_VISIBLE_DEVICES")
        gpus = () if settings.value("cpu") else machine.visible_gpus(visible)
        settings = _count_processes(settings, len(gpus), machines[1])
        processes = _per_machine(settings, _hosts(settings), len(gpus))
        _check_mesh(settings)
        launcher = choose_here(settings)
        # Last, as it divides the cores by the number of processes.
        settings = _count_threads(settings, machine.cores, processes)
    threads = settings["num_cpu_threads_per_process"]
    warn_unused(settings, launcher)
    # Several workers get the variables of their own run instead.
    if launcher == "exec" and _is_nested_run(settings, environ):
        environ = without_worker_variables(environ)
    environ = common_environment(
        settings,
        environ,
        gpus=mask,
        threads=None if threads.source == Source.ENVIRONMENT else threads.value,
    )
    if settings.value("tpu"):
        from accel_launch.launchers.tpu.variables import prepare_tpu, tpu_settings

        _, environ = prepare_tpu(tpu_settings(settings), environ)
    return LaunchPlan(
        settings=settings,
        launcher=launcher,
        script=script,
        arguments=tuple(arguments),
        command=tuple(command),
        environ=environ,
        processes=processes,
        machines=machines,
    )


def _choose_rendezvous(settings: Settings) -> Settings:
    """Use c10d rendezvous when workers may restart.

    In a static rendezvous torch keeps one store for all attempts, where a fast worker finds the addresses of
    the previous attempt.
    """
    name = "rdzv_backend"
    may_restart = settings.value("max_restarts") > 0 or ":" in str(settings.value("num_machines"))
    if not may_restart or settings.value(name) != "static":
        return settings
    if not settings.is_set(name):
        return settings.replace(**{name: Effective("c10d", Source.DETECTED, "detected: restarts")})
    if settings.value("max_restarts"):
        warnings.warn(
            f"A restart can fail with {name}=static (from {settings[name].detail}): torch keeps the "
            "addresses of the previous attempt. Use --rdzv_backend c10d.",
            stacklevel=4,
        )
    return settings


def _machines(settings: Settings) -> tuple[int, int]:
    """Return the smallest and largest number of machines, checked against the machine settings."""
    low, high = _machine_range(settings)
    rank = settings.value("machine_rank")
    if rank >= high:
        raise LaunchError(
            f"machine_rank={rank} (from {settings['machine_rank'].detail}) but num_machines={high} (from "
            f"{settings['num_machines'].detail}); ranks run from 0 to {high - 1}."
        )
    if high > 1 and settings.value("main_process_ip") is None and not _hosts(settings):
        raise LaunchError(
            f"num_machines={settings.value('num_machines')} (from {settings['num_machines'].detail}) needs "
            "the address of machine 0: give --main_process_ip (and --main_process_port)."
        )
    if low != high and settings.value("rdzv_backend") == "static":
        raise LaunchError(
            f"num_machines={low}:{high} is elastic and rdzv_backend=static cannot change size; give "
            "--rdzv_backend c10d."
        )
    return low, high


def _machine_range(settings: Settings) -> tuple[int, int]:
    bounds = [int(bound) for bound in str(settings.value("num_machines")).split(":")]
    return bounds[0], bounds[-1]


def _gpu_mask(settings: Settings, machine: Machine) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as the flags or the config want it; None leaves it alone."""
    ids = settings["gpu_ids"]
    if ids.source not in (Source.FLAG, Source.CONFIG) or str(ids.value).lower() == "all":
        return None
    if settings.value("cpu"):
        if ids.source == Source.FLAG:
            warnings.warn("--gpu_ids is ignored with --cpu.", UserWarning, stacklevel=5)
        return None
    names = [name.strip() for name in str(ids.value).split(",")]
    # Anything else is a UUID, which CUDA accepts too.
    wrong = [name for name in names if name.isdigit() and int(name) >= machine.gpus]
    if wrong or not machine.gpus or not all(names) or len(set(names)) < len(names):
        available = f"GPUs 0 to {machine.gpus - 1}" if machine.gpus else "no NVIDIA or AMD GPU"
        raise LaunchError(
            f"gpu_ids={ids.value} (from {ids.detail}) does not fit this machine, which has {available}. Name "
            "each GPU once, separated by commas, or leave gpu_ids out to use all."
        )
    return ",".join(names)


def _count_processes(settings: Settings, gpus: int, machines: int) -> Settings:
    if settings.value("multi_gpu") and not gpus:
        raise LaunchError(
            f"{settings['multi_gpu'].detail} asks for several GPUs, but no NVIDIA or AMD GPU is visible. "
            "Give --cpu to run on the CPU."
        )
    if settings.is_set("num_processes"):
        return settings
    reason = f"{gpus} visible GPUs" if gpus else "no visible GPU"
    return settings.replace(
        # The other machines are taken to have as many GPUs as this one.
        num_processes=Effective(max(gpus, 1) * machines, Source.DETECTED, f"detected: {reason}")
    )


def _hosts(settings: Settings) -> int:
    """Number of machines in the hostfile of mpirun; 0 without one."""
    if settings.value("mpirun_hostfile") is None or settings.value("launcher") not in ("auto", "mpirun"):
        return 0
    from accel_launch.launchers.hostfile import read_hostfile

    return len(read_hostfile(settings.value("mpirun_hostfile")))


def _per_machine(settings: Settings, hosts: int, gpus: int) -> int:
    total = settings.value("num_processes")
    machines = hosts or _machine_range(settings)[1]
    if total % machines:
        source = settings["mpirun_hostfile" if hosts else "num_machines"].detail
        raise LaunchError(
            f"num_processes={total} (from {settings['num_processes'].detail}) over num_machines={machines} "
            f"(from {source}) leaves {total % machines} over; it counts all machines "
            "and must be a multiple of num_machines. For a run on this machine alone give "
            "--num_machines 1."
        )
    per_machine: int = total // machines
    if gpus and per_machine > gpus:
        raise LaunchError(
            f"num_processes={total} (from {settings['num_processes'].detail}) is {per_machine} per machine, "
            f"but only {gpus} GPUs are visible. Give --num_processes {gpus * machines}, make more GPUs "
            "visible (--gpu_ids, CUDA_VISIBLE_DEVICES), or use --cpu."
        )
    return per_machine


_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def _check_mesh(settings: Settings) -> None:
    """Reject a mesh for another number of processes, as a config for another machine may have."""
    if not settings.value("use_parallelism_config"):
        return
    sizes = {axis: settings.value(f"parallelism_config_{axis}_size") for axis in _AXES}
    product, total = math.prod(sizes.values()), settings.value("num_processes")
    # All axes are 1 by default, and then nothing was requested.
    if product not in (1, total):
        shown = " * ".join(f"{axis}({size})" for axis, size in sizes.items() if size != 1)
        raise LaunchError(
            f"The device mesh {shown} = {product} (from {_mesh_sources(settings)}), but "
            f"num_processes={total} (from {settings['num_processes'].detail}). Give --num_processes "
            f"{product}, or other sizes."
        )


def _mesh_sources(settings: Settings) -> str:
    sizes = [settings[f"parallelism_config_{axis}_size"] for axis in _AXES]
    return ", ".join(dict.fromkeys(each.detail for each in sizes if each.is_set))


def _is_nested_run(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Return whether a worker of another run starts one process that should not participate in that run.

    A number on the command line means that. Without one, `torchrun ... accel launch script.py` means that the
    script is the worker, and the config file of a user is not about that.
    """
    return "LOCAL_RANK" in environ and settings["num_processes"].source == Source.FLAG


def _count_threads(settings: Settings, cores: int, processes: int) -> Settings:
    """Split the cores among the workers, as each would otherwise use all of them."""
    if settings.is_set("num_cpu_threads_per_process") or processes == 1:
        return settings
    # Otherwise each of n processes starts as many threads as there are cores, and they compete for them.
    threads = max(cores // processes, 1)
    detail = f"detected: {cores} cores over {processes} processes"
    return settings.replace(num_cpu_threads_per_process=Effective(threads, Source.DETECTED, detail))
