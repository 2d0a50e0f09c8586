"""Binding a process to the CPU cores that are nearest to its device."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from accel_state import env
from accel_state.devices.table import detect
from accel_state.logging.warning import warn

_logger = logging.getLogger(__name__)
_SYSFS = Path("/sys")


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores of one NUMA node, once.

    A device on the PCI bus names its nearest cores; processes on the CPU take the nodes in turn. The work is
    done at the first call; later ones with the same arguments do nothing (see `override_numa_affinity`). Best
    with at least two cores per process.

    Args:
        local_process_index: Rank of the process on its machine, which is the index of its device.
        verbose: Log the cores; None does so in debug mode (ACCELERATE_DEBUG_MODE).
    """
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores of one NUMA node, whatever was set before.

    Warns, and changes nothing, where the system cannot do it or none of the node's cores is open to this
    process.

    Args:
        local_process_index: Rank of the process on its machine, which is the index of its device.
        verbose: Log the cores; None does so in debug mode (ACCELERATE_DEBUG_MODE).
    """
    if not hasattr(os, "sched_setaffinity"):
        warn("CPU affinity is ignored: this system cannot bind processes to cores.", about="machine")
        return
    # What the device names is exact; to take the nodes in turn is a guess that spreads the load.
    near = _device_cores(local_process_index) or _node_cores(local_process_index)
    # A container or a Slurm job may have fewer cores than the node.
    cores = near & _allowed_cores()
    if not cores:
        warn(
            f"CPU affinity is ignored for local process {local_process_index}: its NUMA node has the cores "
            f"{sorted(near)}, and this process may only use {sorted(_allowed_cores())}.",
            about="process",
        )
        return
    os.sched_setaffinity(0, cores)
    if env.get("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _logger.warning("Local process %d is bound to the CPU cores %s.", local_process_index, sorted(cores))


@cache
def _allowed_cores() -> frozenset[int]:
    # What the process was started with: a later override must not be confined to an earlier binding.
    return frozenset(os.sched_getaffinity(0))


def _device_cores(index: int) -> frozenset[int]:
    address = detect().pci_address(index)
    if address is None:
        return frozenset()
    return _read_cores(_SYSFS / "bus" / "pci" / "devices" / address / "local_cpulist")


def _node_cores(index: int) -> frozenset[int]:
    nodes = sorted(
        # By number, as node10 comes after node2.
        (_SYSFS / "devices" / "system" / "node").glob("node[0-9]*"),
        key=lambda path: int(path.name[4:]),
    )
    # Nodes of memory alone have no cores.
    with_cores = [cores for cores in (_read_cores(node / "cpulist") for node in nodes) if cores]
    return with_cores[index % len(with_cores)] if with_cores else frozenset()


def _read_cores(path: Path) -> frozenset[int]:
    """Read a list of cores as Linux writes it ("0-3,8,10-11")."""
    if not path.is_file():
        return frozenset()
    # A single core is a span of one part: its first and last are the same.
    spans = [part.split("-") for part in path.read_text().strip().split(",") if part]
    return frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))
