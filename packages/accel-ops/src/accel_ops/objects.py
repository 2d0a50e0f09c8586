"""Collectives for any Python objects, by pickling."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from accel_ops import contract
from accel_ops.checks import require_group, require_rank
from accel_state.process import Process, current_process

__all__ = ["broadcast_object_list", "gather_object"]


def gather_object(object: Any, *, process: Process | None = None) -> list[Any]:
    """Collect the objects of all processes in one list, in rank order, on every process.

    Args:
        object: A list or tuple, whose entries are collected; its length may differ between processes.
            Anything else counts as one entry.
        process: The facts of this process; the current one by default.

    Returns:
        The entries of all processes.

    Raises:
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    entries = list(object) if isinstance(object, list | tuple) else [object]
    if process.world_size == 1:
        return entries
    if process.debug:
        contract.check("gather_object", process=process)
    require_group("gather_object", process)
    gathered: list[Any] = [None] * process.world_size
    dist.all_gather_object(gathered, entries)
    return [entry for part in gathered for entry in part]


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, process: Process | None = None
) -> list[Any]:
    """Give every process the objects that one process has.

    Args:
        object_list: The objects, on the others as many placeholders, which are replaced in place.
        from_process: Rank of the process whose objects count.
        process: The facts of this process; the current one by default.

    Returns:
        `object_list` itself.

    Raises:
        TypeError: If `object_list` is not a list.
        ValueError: If there is no process `from_process`.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    if not isinstance(object_list, list):
        raise TypeError(
            f"broadcast_object_list fills a list in place, but got a {type(object_list).__name__}. Put the "
            f"objects in "
            "a list of the same length on every process."
        )
    require_rank("broadcast_object_list", from_process, process)
    if process.world_size == 1:
        return object_list
    if process.debug:
        detail = f"from_process={from_process}, {len(object_list)} objects"
        contract.check("broadcast_object_list", process=process, detail=detail, one_place=False)
    require_group("broadcast_object_list", process)
    dist.broadcast_object_list(object_list, from_process)
    return object_list
