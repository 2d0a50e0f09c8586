"""Steps of all ranks that succeed everywhere or raise everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from accel_ckpt.errors import CheckpointError
from accel_ops.collectives.objects import broadcast_object_list, gather_object

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo

_T = TypeVar("_T")


def raise_if_any_failed(error: Exception | None, process: ProcessInfo, task: str, group: Any = None) -> None:
    """Raise on every process if any of them failed. Every process must call this.

    Args:
        error: The error of this process; None if it has none.
        process: This process.
        task: What was done, for the message ("writing the checkpoint").
        group: The process group of the collective, for saves in the background; by default the default group.

    Raises:
        Exception: `error`, on the processes that have one.
        CheckpointError: On the other processes, if any failed; it names each failed process and its error.
    """
    # Text, not the exceptions: they may not pickle, or have a type that another process does not have.
    reports: list[str | None] = [None]
    if process.world_size > 1:
        report = None if error is None else f"{type(error).__name__}: {error}"
        reports = all_gather_object(report, process, group)
    if error is not None:
        raise error
    failed = [f"process {rank}: {text}" for rank, text in enumerate(reports) if text is not None]
    if failed:
        raise CheckpointError(f"{task} failed on another process. {'; '.join(failed)}")


def all_gather_object(value: Any, process: ProcessInfo, group: Any = None) -> list[Any]:
    """Return the value of every process, on every process. Every process must call this.

    Args:
        value: The value of this process; it must pickle.
        process: This process.
        group: As for `raise_if_any_failed`.

    Returns:
        The values in rank order.
    """
    if group is None:
        return gather_object([value], process=process)
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value, group)
    return values


def run_on_all_ranks(function: Callable[[], _T], process: ProcessInfo, task: str, group: Any = None) -> _T:
    """Call a function on every process, and raise on every process if it failed on any.

    Args:
        function: The function of this process.
        process: This process.
        task: What it does, for the message.
        group: As for `raise_if_any_failed`.

    Returns:
        What the function returned on this process.

    Raises:
        Exception: As `raise_if_any_failed`.
    """
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        error = caught
    raise_if_any_failed(error, process, task, group)
    return result


def run_on_main(function: Callable[[], _T], process: ProcessInfo, task: str) -> _T:
    """Call a function on the main process, and return its result on all.

    Args:
        function: The function; its result must pickle.
        process: This process.
        task: What it does, for the message.

    Returns:
        What the function returned on the main process.

    Raises:
        Exception: What the function raised, on the main process; a CheckpointError with it on the others.
    """
    if process.world_size == 1:
        return function()
    error: Exception | None = None
    box: list[Any] = [(None, None)]
    if process.is_main:
        try:
            box = [(function(), None)]
        except Exception as caught:
            error = caught
            # Sent after an error too: the other ranks wait in the broadcast.
            box = [(None, f"{type(caught).__name__}: {caught}")]
    broadcast_object_list(box, process=process)
    result: _T
    result, report = box[0]
    if error is not None:
        raise error
    if report is not None:
        raise CheckpointError(f"{task} failed on the main process. {report}")
    return result
