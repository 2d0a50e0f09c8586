"""Collectives for any Python objects, by pickling.

An object that cannot be pickled raises on every process, not only on its own: the others would deadlock.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed as dist

from accel_ops.collectives.checks import require_group, require_rank
from accel_ops.debug import check_collectives
from accel_ops.trees.walk import is_namedtuple
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process


def gather_object(object: Any, *, process: ProcessInfo | None = None) -> list[Any]:
    """Collect the objects of all processes in one list, in rank order, on every process.

    Args:
        object: A list or tuple, whose entries are collected; its length may differ between processes.
            Anything else counts as one entry.
        process: This process; the current one by default.

    Returns:
        The entries of all processes.

    Raises:
        TypeError: On every process, if one's objects cannot be pickled.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    # A namedtuple is one record, though it is a tuple.
    is_sequence = isinstance(object, (list, tuple)) and not is_namedtuple(object)
    entries = list(object) if is_sequence else [object]
    if process.world_size == 1:
        return entries
    if process.debug:
        check_collectives.check("gather_object", process=process)
    require_group("gather_object", process)
    # Pickled before the collective: an object that cannot be pickled is replaced by its error text.
    pickled: list[Any] = [None] * process.world_size
    dist.all_gather_object(pickled, _pickled(entries))
    _raise_failures("gather_object", dict(enumerate(pickled)))
    return [entry for item in pickled for entry in pickle.loads(item)]


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, process: ProcessInfo | None = None
) -> list[Any]:
    """Give every process the objects that one process has.

    Args:
        object_list: The objects, on the others as many placeholders, which are replaced in place.
        from_process: Rank of the process whose objects count.
        process: This process; the current one by default.

    Returns:
        `object_list` itself.

    Raises:
        TypeError: If `object_list` is not a list; on every process, if the objects cannot be pickled.
        ValueError: If there is no process `from_process`, or it has another number of objects.
        RuntimeError: If the process group has been destroyed.
        DistributedOperationException: In debug mode, if the processes disagree.
    """
    process = process or current_process()
    if not isinstance(object_list, list):
        raise TypeError(
            f"broadcast_object_list fills a list in place, but got a {type(object_list).__name__}. Put the "
            "objects in a list of the same length on every process."
        )
    require_rank("broadcast_object_list", from_process, process)
    if process.world_size == 1:
        return object_list
    if process.debug:
        detail = f"from_process={from_process}, {len(object_list)} objects"
        check_collectives.check("broadcast_object_list", process=process, detail=detail, one_place=False)
    require_group("broadcast_object_list", process)
    sends = process.rank == from_process
    # None is what torch replaces on the processes that receive.
    payload = [_pickled(object_list) if sends else None]
    dist.broadcast_object_list(payload, from_process)
    _raise_failures("broadcast_object_list", {from_process: payload[0]})
    if not sends:
        _copy_into(object_list, pickle.loads(payload[0]), from_process)  # type: ignore[arg-type]
    return object_list


def _pickled(objects: list[Any]) -> bytes | str:
    """Return the pickled objects, or why they cannot be pickled."""
    try:
        return pickle.dumps(objects)
    except Exception as error:  # whatever a class does in its __reduce__
        return f"{type(error).__name__}: {error}"


def _raise_failures(operation: str, payloads: dict[int, bytes | str | None]) -> None:
    reasons = [f"process {rank} ({text})" for rank, text in payloads.items() if isinstance(text, str)]
    if reasons:
        raise TypeError(
            f"{operation}: the objects of {', '.join(reasons)} cannot be pickled. Pass plain values or "
            "tensors, or objects of classes that are defined at the top level of a module."
        )


def _copy_into(object_list: list[Any], received: list[Any], source: int) -> None:
    if len(received) != len(object_list):
        raise ValueError(
            f"broadcast_object_list: process {source} has {len(received)} objects, but the list here has "
            f"{len(object_list)}. Pass a list of the same length on every process."
        )
    # In place: the caller holds this list, as with torch's function of the same name.
    object_list[:] = received
