"""Checks that come before a collective: clear errors for tensors that a process group cannot communicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from accel_ops.trees.walk import find_path
from accel_state.process.info import ProcessInfo

# Cached per group, as every collective needs it.
_movable_by_group: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def require_group(operation: str, process: ProcessInfo) -> dist.ProcessGroup:
    """Return the group of all processes; raise if this process cannot talk to the others.

    Args:
        operation: Name of the collective.
        process: This process; it is one of several.

    Returns:
        The group.

    Raises:
        RuntimeError: If there is no process group.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            f"{operation}: process {process.rank} of {process.world_size} cannot reach the others, because "
            f"the process group has been destroyed or was never made. Call {operation} before "
            "destroy_process_group() or end_training()."
        )
    return group


def require_rank(operation: str, from_process: int, process: ProcessInfo) -> None:
    """Raise unless `from_process` is the rank of a process.

    Raises:
        ValueError: If there is no such process.
    """
    if not 0 <= from_process < process.world_size:
        raise ValueError(
            f"{operation}: from_process={from_process}, but there are {process.world_size} process(es); "
            f"give a rank from 0 to {process.world_size - 1}."
        )


def require_plain(operation: str, data: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Raise unless every tensor is a dense block of memory of this process.

    Args:
        operation: Name of the collective.
        data: The tree that the tensors come from.
        leaves: The tensors.

    Raises:
        TypeError: If one is a DTensor, a sparse, nested or quantized tensor, or wraps others.
    """
    # Searched in the leaves; its path in the tree is only computed for the error.
    unsupported = next((leaf for leaf in leaves if not _is_plain(leaf)), None)
    if unsupported is not None:
        match = find_path(data, lambda node: node is unsupported)
        assert match is not None
        raise TypeError(f"{operation} moves dense tensors, but {match[0]} {_reason(unsupported)}.")


def require_devices(operation: str, data: Any, devices: Iterable[torch.device], process: ProcessInfo) -> None:
    """Raise if the process group cannot move tensors that are on these devices.

    Args:
        operation: Name of the collective.
        data: The tree that the tensors come from.
        devices: The devices of its tensors.
        process: This process.

    Raises:
        ValueError: If a device is not one of the process group's.
    """
    movable = _movable()
    for device in devices:
        if device.type in movable:
            continue
        config = dist.get_backend_config()
        match = find_path(
            data, lambda node: isinstance(node, torch.Tensor) and node.device.type not in movable
        )
        assert match is not None
        raise ValueError(
            f"{operation}: {match[0]} is on {match[1].device}, but the process group ({config}) moves "
            f"tensors on {' and '.join(sorted(movable))} only. Send it to {process.device} first, for "
            "example with send_to_device."
        )


def _is_plain(leaf: torch.Tensor) -> bool:
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    # Classes that wrap other tensors flatten themselves for torch.compile; plain subclasses do not.
    return type(leaf) is torch.Tensor or not hasattr(leaf, "__tensor_flatten__")


def _reason(leaf: torch.Tensor) -> str:
    name = type(leaf).__name__
    # By name: torch.distributed.tensor takes long to import, and is not needed to word an error.
    if name == "DTensor":
        return "is a DTensor, of which each process has a shard; pass its .full_tensor() or .to_local()"
    if leaf.is_nested:
        return "is a nested tensor; pass leaf.values() and leaf.offsets(), or pad it with to_padded_tensor()"
    if leaf.layout is not torch.strided:
        return f"is a sparse tensor ({leaf.layout}); pass its .to_dense()"
    if leaf.is_quantized:
        return "is a quantized tensor; pass its .dequantize(), or .int_repr() with scale and zero point"
    return f"is a {name}, which wraps other tensors; pass those"


def _movable() -> frozenset[str]:
    """Return the device types that the default process group can move."""
    group = dist.group.WORLD
    movable = _movable_by_group.get(group)
    if movable is None:
        # "cpu:gloo,cuda:nccl": torch has no public list of the devices of a group.
        entries = dist.get_backend_config().split(",")
        movable = _movable_by_group[group] = frozenset(entry.partition(":")[0] for entry in entries)
    return movable
