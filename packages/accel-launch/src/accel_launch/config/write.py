"""Write a config file that fits this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_launch.config.file import LaunchConfig
from accel_launch.config.paths import config_path
from accel_launch.plan.machine import Machine
from accel_state import env


def basic_values(mixed_precision: str, machine: Machine) -> dict[str, Any]:
    """Return the config of one machine with all its GPUs, or of one process without GPUs.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        machine: The machine's processors.
    """
    gpus = len(machine.visible_gpus(env.raw("CUDA_VISIBLE_DEVICES")))
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if gpus > 1 else "NO",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(gpus, 1),
        "use_cpu": False,
    }


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | bool:
    """Write a config file for this machine: all its GPUs, or one process without GPUs.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        save_location: The file (YAML, or JSON if so named); the default config file if None.

    Returns:
        The file's path, or False if the file already exists, which is left unchanged.

    Raises:
        ConfigError: If the precision is unknown.
    """
    path = Path(save_location).expanduser() if save_location is not None else config_path()
    # Never overwritten: it may be the only record of how a cluster is set up.
    if path.exists():
        print(f"The config file {path} already exists and is left unchanged. Delete it or name another file.")
        return False
    LaunchConfig.from_values(basic_values(mixed_precision, Machine.detect())).write(path)
    return path
