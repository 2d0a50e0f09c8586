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

    For a device on the PCI bus these are its nearest cores; processes on the CPU take the nodes in turn. Only
    the first call has an effect; later ones with the same arguments do nothing (see
    `override_numa_affinity`). Best with at least two cores per process.

    Args:
        local_process_index: Rank of the process on its machine, which is the index of its device.
        verbose: Log the cores; None does so in debug mode (ACCELERATE_DEBUG_MODE).
    """
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores of one NUMA node, replacing an earlier binding.

    Warns, and changes nothing, where the system cannot do it or none of the node's cores is open to this
    process.

    Args:
        local_process_index: Rank of the process on its machine, which is the index of its device.
        verbose: Log the cores; None does so in debug mode (ACCELERATE_DEBUG_MODE).
    """
    if not hasattr(os, "sched_setaffinity"):
        warn("CPU affinity is ignored: this system cannot bind processes to cores.", about="machine")
        return
    # The device's cores are exact; taking the nodes in turn only spreads the load.
    nearest_cores = _device_cores(local_process_index) or _node_cores(local_process_index)
    # A container or a Slurm job may have fewer cores than the node.
    cores = nearest_cores & _allowed_cores()
    if not cores:
        warn(
            f"CPU affinity is ignored for local process {local_process_index}: its NUMA node has the cores "
            f"{sorted(nearest_cores)}, and this process may only use {sorted(_allowed_cores())}.",
            about="process",
        )
        return
    os.sched_setaffinity(0, cores)
    if env.get("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        _logger.warning("Local process %d is bound to the CPU cores %s.", local_process_index, sorted(cores))


@cache
def _allowed_cores() -> frozenset[int]:
    # Cached at the first call: a later override must not be limited by an earlier binding.
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
    # Memory-only nodes have no cores.
    with_cores = [cores for cores in (_read_cores(node / "cpulist") for node in nodes) if cores]
    return with_cores[index % len(with_cores)] if with_cores else frozenset()


def _read_cores(path: Path) -> frozenset[int]:
    """Read a list of cores as Linux writes it ("0-3,8,10-11")."""
    if not path.is_file():
        return frozenset()
    # A single core is a span whose first and last are the same.
    spans = [item.split("-") for item in path.read_text().strip().split(",") if item]
    return frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))
