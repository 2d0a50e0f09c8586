"""Copying the next batch to an accelerator while the previous one is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple

import torch

from accel_data.loader.read_ahead import RandomUse
from accel_data.order.layout import EpochInfo, StepRows
from accel_ops.trees.send import send_to_device
from accel_ops.trees.walk import children, find_path, flatten, recursively_apply
from accel_state.devices.table import DEVICES, DeviceSpec


class Copy(NamedTuple):
    """A batch on its way to the device.

    Args:
        batch: The batch.
        done: The event recorded after the copy; None if the batch stays where it is.
        step_rows: See `EpochInfo.current_rows`.
    """

    batch: Any
    done: Any
    step_rows: StepRows | None


class SideStream:
    """A device stream in which batches are copied, separate from the one in which the user computes.

    Args:
        entry: The row of the device.
        device: The device.
        non_blocking: Let the device, not this process, wait until a copy is finished.
    """

    def __init__(self, entry: DeviceSpec, device: torch.device, non_blocking: bool) -> None:
        self._row = entry
        self._device = device
        self._non_blocking = non_blocking
        self._stream = _copy_stream(entry.with_index(device))

    @classmethod
    def of(cls, device: torch.device | str | int, non_blocking: bool) -> SideStream | None:
        """Make one, or return None for a device without streams, such as the CPU."""
        device = torch.device(device)
        entry = DEVICES.get(device.type)
        return cls(entry, device, non_blocking) if entry is not None and entry.streams else None

    def start(self, batch: Any, step_rows: StepRows | None) -> Copy:
        """Start copying a batch.

        Args:
            batch: The batch. If it may contain tensors that cannot be found, it stays where it is: nothing
                could tell when their memory is free again.
            step_rows: See `Copy`.
        """
        if find_path(batch, _hides_tensors) is not None:
            return Copy(batch, None, step_rows)
        # A copy from pageable memory would block this process, on any stream.
        pinned = recursively_apply(torch.Tensor.pin_memory, batch, test_type=_is_pageable)
        with self._row.on_stream(self._stream):
            moved = send_to_device(pinned, self._device, non_blocking=True)
        return Copy(moved, self._stream.record_event(), step_rows)

    def finish(self, copy: Copy) -> Any:
        """Make the user's stream wait for a copy.

        Args:
            copy: What `start` returned.

        Returns:
            The batch.
        """
        if copy.done is None:
            return copy.batch
        current = self._row.current_stream(self._device)
        current.wait_event(copy.done)
        # If blocking, a batch is complete when it is yielded, as after a plain `to`.
        if not self._non_blocking:
            copy.done.synchronize()
        for tensor in flatten(copy.batch)[0]:
            if tensor.device.type == self._device.type:
                # Its memory belongs to the side stream, which must not reuse it before the user's stream is
                # done.
                tensor.record_stream(current)
        return copy.batch


def copy_ahead(batches: Iterator[Any], info: EpochInfo, side: SideStream) -> Generator[Any, None, None]:
    """Copy each batch while the previous one is used.

    It is read one step ahead, unless reading uses the global random generators of this process: then each
    batch is read and copied when it is requested.

    Args:
        batches: The batches.
        info: Information about the current batch, when it is read and again when it is yielded.
        side: The stream that copies.

    Yields:
        The batches, on the device.
    """
    # The first batch decides: it is read when it is requested, so checking the generators changes nothing.
    use = RandomUse()
    upcoming = _start_next(batches, info, side)
    ahead = not use.seen()
    while (copy := upcoming.result()) is not None:
        batch = side.finish(copy)
        if ahead:
            upcoming = _start_next(batches, info, side)
        info.current_rows = copy.step_rows
        yield batch
        if not ahead:
            upcoming = _start_next(batches, info, side)


@cache
def _copy_stream(device: torch.device) -> Any:
    # One for all loaders and epochs: memory freed in a stream is only reused in that stream. Their copies
    # wait for each other, as they do on the way to the device anyway.
    return DEVICES[device.type].new_stream(device)


def _start_next(batches: Iterator[Any], info: EpochInfo, side: SideStream) -> Future[Copy | None]:
    """Read and copy one batch; an error is raised when the batch is requested."""
    upcoming: Future[Copy | None] = Future()
    try:
        upcoming.set_result(next((side.start(batch, info.current_rows) for batch in batches), None))
    except Exception as error:
        upcoming.set_exception(error)
    return upcoming


def _is_pageable(leaf: Any) -> bool:
    # Exact types: a subclass may do anything in pin_memory.
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.is_cpu
    return plain and not leaf.is_pinned()


def _hides_tensors(node: Any) -> bool:
    if isinstance(node, torch.Tensor):
        # Objects with their own `to` may contain tensors that are not found by walking the batch.
        return node.layout != torch.strided or node.is_nested
    return children(node) is None and callable(getattr(type(node), "to", None))
