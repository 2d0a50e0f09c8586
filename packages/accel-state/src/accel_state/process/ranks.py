"""Finding the ranks of this process, in the run and on the machine, and the index of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from accel_state import env
from accel_state.devices.spec import DeviceSpec
from accel_state.env import CPUInformation
from accel_state.process.rendezvous import has_group
from accel_state.process.slurm import tasks_on_machine


def find_ranks(spec: DeviceSpec, options: Mapping[str, Any]) -> CPUInformation:
    """Return this process's ranks and the numbers of processes.

    They come from an existing group; else from explicit options, the device's runtime, or the environment
    (torchrun's variables, then MPI's), in this order. Without a local rank, one machine is assumed.

    Args:
        spec: The hardware.
        options: Checked options of `init_process_group`.

    Returns:
        Rank and size, in the run and on the machine.

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    # An existing group wins: the environment may describe another run.
    if has_group():
        return _on_machine(dist.get_rank(), dist.get_world_size())
    if "world_size" in options or "rank" in options:
        return _on_machine(int(options.get("rank", -1)), int(options.get("world_size", -1)))
    # On TPUs the runtime numbers the processes, not a launcher.
    runtime = spec.launched_as()
    if runtime is not None:
        return CPUInformation(*runtime)
    info = env.get_cpu_distributed_information()
    return _on_machine(info.rank, info.world_size)


def _on_machine(rank: int, world_size: int) -> CPUInformation:
    # Checked here, as torch would hang waiting for a rank that does not exist.
    if not 0 <= rank < world_size:
        raise ValueError(
            f"Rank {rank} is not one of {world_size} process(es): ranks count from 0 to the number of "
            "processes less one. Set RANK and WORLD_SIZE (or rank and world_size) both, or neither."
        )
    local_rank, local_size = _local(rank, world_size)
    if not local_rank < local_size <= world_size:
        raise ValueError(
            f"Local rank {local_rank} of {local_size} process(es) on this machine, in a run of "
            f"{world_size}: the local rank must be below the local size, and that not above the total. "
            "Check LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE."
        )
    return CPUInformation(rank, world_size, local_rank, local_size)


def _local(rank: int, world_size: int) -> tuple[int, int]:
    if world_size == 1 or env.get_int_from_env(env._SIZE, world_size) != world_size:
        return rank, world_size  # the environment names no run, or another one
    # srun without a launcher: Slurm has its own variables for the local rank.
    if not any(env.is_set(name) for name in env._LOCAL_RANK) and env.get("SLURM_NTASKS") == world_size:
        local_size = tasks_on_machine(env.get("SLURM_NODEID") or 0)
        return env.get("SLURM_LOCALID") or 0, world_size if local_size is None else local_size
    return env.get_int_from_env(env._LOCAL_RANK, rank), env.get_int_from_env(env._LOCAL_SIZE, world_size)


def device_index(spec: DeviceSpec, ranks: CPUInformation) -> int | None:
    """Return the index of this process's device, or None for the current one.

    Args:
        spec: The hardware.
        ranks: The ranks of this process.

    Returns:
        The local rank; 0 where each process sees only its own device; the index in ACCELERATE_TORCH_DEVICE
        for one process.

    Raises:
        ValueError: If there are fewer devices than processes on this machine.
    """
    if ranks.world_size == 1:
        return spec.requested_index()
    if not spec.indexed:
        return None
    count = spec.count()
    if ranks.local_rank < count:
        return ranks.local_rank
    restricted = spec.visible_devices is not None and env.is_set(spec.visible_devices)
    # srun with one GPU per task shows one; torchrun's workers all see the same devices.
    if count == 1 and restricted and not env.is_set("TORCHELASTIC_RUN_ID"):
        return 0
    raise ValueError(
        f"Local rank {ranks.local_rank} has no device: this process sees {count} {spec.type} "
        f"device(s) for {ranks.local_world_size} processes on this machine. Start at most {count} per machine"
        + (f", or widen {spec.visible_devices}" if restricted else "")
        + ", or run on the CPU (ACCELERATE_USE_CPU=true). On several machines, LOCAL_RANK must be set."
    )
