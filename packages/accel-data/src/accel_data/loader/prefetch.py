"""Copying the next batch to an accelerator while the one before is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple

import torch

from accel_data.loader.read_ahead import RandomUse
from accel_data.order.layout import Share, StepRows
from accel_ops.trees.send import send_to_device
from accel_ops.trees.walk import children, find_path, flatten, recursively_apply
from accel_state.devices.table import DEVICES, DeviceSpec


class Copy(NamedTuple):
    """A batch on its way to the device.

    Args:
        batch: The batch.
        done: The event that comes when it is there; None if it stays where it is.
        fill: What the share said of it; see `Share.now`.
    """

    batch: Any
    done: Any
    fill: StepRows | None


class SideStream:
    """A stream of the device in which batches are copied, beside the one in which the user computes.

    Args:
        entry: The row of the device.
        device: The device.
        non_blocking: Let the device wait for a copy, where it must be finished, and not this process.
    """

    def __init__(self, entry: DeviceSpec, device: torch.device, non_blocking: bool) -> None:
        self._row = entry
        self._device = device
        self._non_blocking = non_blocking
        self._stream = _copying_stream(entry.with_index(device))

    @classmethod
    def of(cls, device: torch.device | str | int, non_blocking: bool) -> SideStream | None:
        """Make one, or return None for a device without streams, as the CPU."""
        device = torch.device(device)
        entry = DEVICES.get(device.type)
        return cls(entry, device, non_blocking) if entry is not None and entry.streams else None

    def start(self, batch: Any, fill: StepRows | None) -> Copy:
        """Begin to copy a batch.

        Args:
            batch: The batch. One with tensors that cannot be seen stays where it is: nothing could
                say when their memory is free again.
            fill: See `Copy`.
        """
        if find_path(batch, _hides_tensors) is not None:
            return Copy(batch, None, fill)
        # A copy from pageable memory would make this process wait, on any stream.
        pinned = recursively_apply(torch.Tensor.pin_memory, batch, test_type=_is_pageable)
        with self._row.on_stream(self._stream):
            moved = send_to_device(pinned, self._device, non_blocking=True)
        return Copy(moved, self._stream.record_event(), fill)

    def finish(self, copy: Copy) -> Any:
        """Let the user's stream wait for a copy.

        Args:
            copy: What `start` returned.

        Returns:
            The batch.
        """
        if copy.done is None:
            return copy.batch
        current = self._row.current_stream(self._device)
        current.wait_event(copy.done)
        # Without it a batch is there when it is handed out, as after a plain `to`.
        if not self._non_blocking:
            copy.done.synchronize()
        for tensor in flatten(copy.batch)[0]:
            if tensor.device.type == self._device.type:
                # Its memory belongs to the side stream, which must not reuse it before the user's is done.
                tensor.record_stream(current)
        return copy.batch


def copied_ahead(batches: Iterator[Any], share: Share, side: SideStream) -> Generator[Any, None, None]:
    """Copy each batch while the one before is used.

    For that it is read before its turn, unless reading uses the global random generators of this process:
    then each is read and copied when it is its turn.

    Args:
        batches: The batches.
        share: What is known of the batch at hand, when it is read and when it is handed on.
        side: Copies.

    Yields:
        The batches, on the device.
    """
    # The first batch tells: it is read when it is asked for, so that looking at
    # the generators changes nothing.
    use = RandomUse()
    following = _tried(batches, share, side)
    ahead = not use.seen()
    while (copy := following.result()) is not None:
        batch = side.finish(copy)
        if ahead:
            following = _tried(batches, share, side)
        share.now = copy.fill
        yield batch
        if not ahead:
            following = _tried(batches, share, side)


@cache
def _copying_stream(device: torch.device) -> Any:
    # One for all loaders and passes: memory that is freed in a stream is kept for that stream alone. Their
    # copies wait for one another, which they do on the way to the device too.
    return DEVICES[device.type].new_stream(device)


def _tried(batches: Iterator[Any], share: Share, side: SideStream) -> Future[Copy | None]:
    """Read and copy one batch; an error comes when it is its turn."""
    following: Future[Copy | None] = Future()
    try:
        following.set_result(next((side.start(batch, share.now) for batch in batches), None))
    except Exception as error:
        following.set_exception(error)
    return following


def _is_pageable(leaf: Any) -> bool:
    # Exact types: a subclass may do anything in pin_memory.
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.is_cpu
    return plain and not leaf.is_pinned()


def _hides_tensors(node: Any) -> bool:
    if isinstance(node, torch.Tensor):
        # Objects with a `to` of their own may hold tensors that no walk of the batch finds.
        return node.layout != torch.strided or node.is_nested
    return children(node) is None and callable(getattr(type(node), "to", None))
