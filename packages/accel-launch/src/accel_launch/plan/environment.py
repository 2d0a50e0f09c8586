"""The environment that workers get, written through accel_state's table."""

from __future__ import annotations

from collections.abc import Mapping

from accel_launch.plan.drop_in import drop_in_environment
from accel_launch.settings.resolve import Settings, Source
from accel_launch.settings.schema import SETTINGS
from accel_state import env
from accel_state.env import CPUInformation

# A worker that believes to run under torchrun would wait for torchrun's store instead of opening its own.
_TORCHRUN = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
)
# The variables that make a process a worker of a run.
_RENDEZVOUS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_NUM_PROCESSES",
)
# Written by the plan, which knows what they depend on.
_PLANNED = frozenset(
    {"num_processes", "gpu_ids", "num_cpu_threads_per_process", "main_process_ip", "main_process_port"}
)


def common_environment(
    settings: Settings, base: Mapping[str, str], *, gpus: str | None, threads: int | None
) -> dict[str, str]:
    """Return the environment common to all workers.

    Args:
        settings: The effective settings.
        base: The environment to start from.
        gpus: CUDA_VISIBLE_DEVICES; None leaves it as it is.
        threads: OMP_NUM_THREADS; None leaves it as it is.

    Returns:
        A new environment. Settings whose group is not switched on are not written, and defaults only of
        settings that say so.
    """
    environ = dict(base)
    for setting in SETTINGS.values():
        found = settings[setting.name]
        is_user_set = found.is_set and found.source != Source.ENVIRONMENT
        default = setting.always and not found.is_set and found.value not in (None, ())
        if not setting.from_environment or setting.name in _PLANNED or not settings.active(setting):
            continue
        if is_user_set or default:
            env.put(environ, setting.spec.name, found.value)
    if settings.value("drop_in"):
        environ = drop_in_environment(environ)
    # DeepSpeed's own file may set these too; the names say which ones the user has set here as well.
    fields = [
        setting.name
        for setting in SETTINGS.values()
        if setting.section == "deepspeed_config" and settings[setting.name].source == Source.CONFIG
    ]
    # Empty means that there is nothing to compare with DeepSpeed's file.
    if fields and settings.value("use_deepspeed"):
        env.put(environ, "ACCELERATE_CONFIG_DS_FIELDS", fields)
    if gpus is not None:
        env.put(environ, "CUDA_VISIBLE_DEVICES", gpus)
    if threads is not None:
        env.put(environ, "OMP_NUM_THREADS", threads)
    # Not from the environment, where they are already, nor detected ones, which the launcher decides.
    for name in ("main_process_ip", "main_process_port"):
        if settings[name].source in (Source.FLAG, Source.CONFIG):
            env.put(environ, SETTINGS[name].spec.name, settings.value(name))
    return environ


def worker_environment(
    common: Mapping[str, str],
    place: CPUInformation,
    address: str,
    port: int,
    machine: tuple[int, int] = (0, 1),
) -> dict[str, str]:
    """Return the environment of one worker.

    Args:
        common: The environment common to all workers.
        place: The worker's rank and the number of workers, in all and on its machine.
        address: Where rank 0 listens.
        port: The port it listens on.
        machine: The machine's rank and the number of machines.
    """
    # This launcher may be a worker of torchrun itself.
    environ = {name: text for name, text in common.items() if name not in _TORCHRUN}
    values = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": machine[0],
        "GROUP_WORLD_SIZE": machine[1],
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "ACCELERATE_NUM_PROCESSES": place.world_size,
    }
    for name, value in values.items():
        env.put(environ, name, value)
    return environ


def without_worker_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that make a process a worker of another run.

    Args:
        environ: The environment.
    """
    return {name: text for name, text in environ.items() if name not in _RENDEZVOUS + _TORCHRUN}
