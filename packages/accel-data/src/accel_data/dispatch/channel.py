"""Sending batches from process 0 to the other processes, in one message per process and step.

The messages use a separate process group, so that they do not mix with the user's collectives and can be sent
by another thread while these run. Each process gets its own message: a header, the structure of its batch if
that has changed, and the bytes of its tensors. The next message is in flight while a batch is used: process 0
sends the next one without waiting for the previous one to arrive, and the other processes post the next
receive as soon as they have a batch. When a message does not fit, the receivers' buffers grow first.

A run that is left early leaves messages behind. They carry the number of their run and are skipped. gloo
needs the memory of a message until it has arrived, even if no process needs it anymore.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from accel_data.dispatch.wire import Packer, Packet, Unpacker, check_same_structure
from accel_data.order.layout import StepRows

NO_BATCH: Any = object()
"""Placeholder for the batch of a process that has none in the last step."""

# Kinds of messages. Integers, not an Enum: they are packed into the header of every message.
_BATCH, _GROW, _STOP, _ABORT, _ERROR = range(5)
_FIELDS = 6  # of the header, before the sizes: run, kind, value, last, bytes of structure, has rows
_PAGE = 4096  # buffers grow to a multiple of this (bytes)


_Sent = tuple[Any, torch.Tensor]
"""A pending send or receive, and its memory."""


class Message(NamedTuple):
    """The batch that process 0 sends to one process in one step.

    Args:
        batch: The batch.
        step_rows: The sizes in this step; None if every process has a full batch.
        last: Whether this is the last step.
    """

    batch: Any
    step_rows: StepRows | None
    last: bool


@dataclass(frozen=True)
class DispatchGroup:
    """The process group for the messages.

    Args:
        process_group: The group.
        tags: Numbers the loaders, equally on all processes, which make them in the same order.
        unfinished: Pending messages of deleted loaders.
    """

    process_group: dist.ProcessGroup
    tags: itertools.count[int] = field(default_factory=itertools.count)
    unfinished: list[_Sent] = field(default_factory=list)


_dispatch_groups: WeakKeyDictionary[dist.ProcessGroup, DispatchGroup] = WeakKeyDictionary()


def get_dispatch_group() -> DispatchGroup:
    """Return the group for the current default process group. A collective when it is first called.

    Raises:
        RuntimeError: If torch was built without gloo, which sends CPU memory on any hardware.
    """
    default = dist.group.WORLD
    assert default is not None
    if default not in _dispatch_groups:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "Process 0 sends batches with gloo, but this torch was built without it. Install a torch "
                "with gloo, or pass dispatch_batches=False."
            )
        group = dist.new_group(backend="gloo", timeout=_timeout(default), group_desc="accel_data")
        _dispatch_groups[default] = DispatchGroup(group)
    return _dispatch_groups[default]


class _SendBuffer:
    """The memory of one step's messages in flight."""

    def __init__(self) -> None:
        self.sent: list[_Sent] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def pack(self, data_rank: int, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Copy the pieces of a message into one buffer, shape (nbytes,)."""
        size = sum(map(len, pieces))
        buffer = self._buffers.get(data_rank)
        if buffer is None or len(buffer) < size:
            # With some room, so that a slightly larger batch needs no new buffer.
            buffer = self._buffers[data_rank] = torch.empty(size + size // 4, dtype=torch.uint8, device="cpu")
        return torch.cat(pieces, out=buffer[:size])

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        sent, self.sent = self.sent, []
        try:
            for work, _ in sent:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(_EXITED.format("A process", _first_line(error))) from error


class Sender:
    """The sending side, on process 0.

    Args:
        dispatch_group: The group for the messages.
        data_ranks: The data-parallel rank of each process; several processes may have the same one.
    """

    def __init__(self, dispatch_group: DispatchGroup, data_ranks: Sequence[int]) -> None:
        self.dispatch_group = dispatch_group
        self.data_ranks = list(data_ranks)
        self.num_data_ranks = max(data_ranks) + 1
        self.number = 0
        self.is_open = False
        self._tag = next(dispatch_group.tags)
        self._packers = {data_rank: Packer() for data_rank in sorted(set(self.data_ranks[1:]))}
        # q: only signed 64-bit integers, so that no field needs padding. The same as in Receiver.
        self._header = struct.Struct(f"{_FIELDS + 2 * self.num_data_ranks}q")
        self._capacity = _PAGE
        # Two, as one is filled while the messages of the other are in flight.
        self._send_buffers = [_SendBuffer(), _SendBuffer()]
        # gloo reads the memory of an isend until it is done: freed earlier, it would send garbage.
        finalize(self, _keep_unfinished, dispatch_group, self._send_buffers)

    def begin(self) -> int:
        """Begin a run.

        Returns:
            Its number.
        """
        if self.is_open:
            self.close()
        self.number += 1
        self.is_open = True
        return self.number

    def pack(self, batches: Sequence[Any]) -> dict[int, Packet | None]:
        """Pack the batches of one step.

        Args:
            batches: The batch of each data-parallel rank; NO_BATCH if it has none, which ends its loop.

        Returns:
            The packets for `send`, by the data-parallel rank of other processes.

        Raises:
            TypeError: If a batch cannot be sent, or the batches differ in structure. Nothing was sent then,
                so that `fail` reaches the other processes.
        """
        existing = [batch for batch in batches if batch is not NO_BATCH]
        check_same_structure(existing)
        try:
            return {
                number: None if batches[number] is NO_BATCH else packer.pack(batches[number])
                for number, packer in self._packers.items()
            }
        except Exception:
            for packer in self._packers.values():
                packer.reset()
            raise

    def send(self, packets: dict[int, Packet | None], step_rows: StepRows | None, last: bool) -> None:
        """Send one step.

        Args:
            packets: What `pack` returned.
            step_rows: See `Message`.
            last: See `Message`.

        Raises:
            RuntimeError: If a process has exited.
        """
        send_buffer = self._next_send_buffer()
        self._grow(max(map(self._size, packets.values()), default=0), send_buffer)
        counts = (*step_rows.real, *step_rows.rows) if step_rows else (0,) * 2 * self.num_data_ranks
        for data_rank, packet in packets.items():
            kind, (text, tensors) = (_STOP, _EMPTY) if packet is None else (_BATCH, packet)
            header = self._header.pack(self.number, kind, 0, last, len(text), step_rows is not None, *counts)
            content = [torch.frombuffer(bytearray(header + text), dtype=torch.uint8), *tensors]
            self._post(send_buffer, data_rank, send_buffer.pack(data_rank, content))
        self.is_open = not last

    def stop(self) -> None:
        """Tell the other processes that there is no batch."""
        self._announce(self._next_send_buffer(), _STOP)
        self.is_open = False

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that process 0 failed."""
        text = f"{type(error).__name__}: {error}".encode()
        with suppress(RuntimeError):  # some may have exited
            send_buffer = self._next_send_buffer()
            self._grow(self._header.size + len(text), send_buffer)
            self._announce(send_buffer, _ERROR, text)
        self.is_open = False

    def close(self) -> None:
        """Wait until all messages have arrived; abort the other processes if this one left the loop early."""
        with suppress(RuntimeError):  # some may have exited
            for send_buffer in self._send_buffers:
                send_buffer.wait()
            if self.is_open:
                self._announce(self._send_buffers[0], _ABORT)
        self.is_open = False

    def _size(self, packet: Packet | None) -> int:
        return self._header.size + (0 if packet is None else packet.nbytes)

    def _grow(self, size: int, send_buffer: _SendBuffer) -> None:
        if size > self._capacity:
            # At least twice as large, so that buffers grow a few times only in a run.
            self._capacity = -(-max(size, 2 * self._capacity) // _PAGE) * _PAGE
            self._announce(send_buffer, _GROW, value=self._capacity)

    def _announce(self, send_buffer: _SendBuffer, kind: int, text: bytes = b"", value: int = 0) -> None:
        header = self._header.pack(self.number, kind, value, 0, len(text), 0, *[0] * 2 * self.num_data_ranks)
        content = torch.frombuffer(bytearray(header + text), dtype=torch.uint8)
        for data_rank in self._packers:
            self._post(send_buffer, data_rank, content)

    def _post(self, send_buffer: _SendBuffer, data_rank: int, content: torch.Tensor) -> None:
        for rank, other in enumerate(self.data_ranks[1:], 1):
            if other == data_rank:
                try:
                    work = dist.isend(content, rank, group=self.dispatch_group.process_group, tag=self._tag)
                    send_buffer.sent.append((work, content))
                except (RuntimeError, ValueError) as error:  # ValueError if the group was destroyed
                    raise RuntimeError(_EXITED.format(f"Process {rank}", _first_line(error))) from error

    def _next_send_buffer(self) -> _SendBuffer:
        """Return the buffer of the step before the last one, once its messages have arrived."""
        # The last used one comes second, so that its messages have a full step to arrive.
        self._send_buffers.reverse()
        self._send_buffers[0].wait()
        return self._send_buffers[0]


class Receiver:
    """The receiving side, on any other process.

    Args:
        dispatch_group: The group for the messages.
        data_ranks: As for `Sender`.
    """

    def __init__(self, dispatch_group: DispatchGroup, data_ranks: Sequence[int]) -> None:
        self.dispatch_group = dispatch_group
        self.number = 0
        self._tag = next(dispatch_group.tags)
        self.num_data_ranks = max(data_ranks) + 1
        self._header = struct.Struct(f"{_FIELDS + 2 * self.num_data_ranks}q")
        # Keeps the structure between batches: it is sent only when it has changed.
        self._unpacker = Unpacker()
        self._receives: list[_Sent] = []
        self._resize(_PAGE)
        finalize(self, dispatch_group.unfinished.extend, self._receives)

    def begin(self) -> int:
        """Begin a run.

        Returns:
            Its number.
        """
        self.number += 1
        self._post_receive()
        return self.number

    def receive(self) -> Message | None:
        """Receive one step.

        Returns:
            This process's batch; None if there is none.

        Raises:
            RuntimeError: If process 0 failed to read it, has left the loop, or has exited.
        """
        while True:
            self._wait()
            number, kind, value, last, size, has_rows, *counts = self._header.unpack_from(self._view)
            start = self._header.size
            text = bytes(self._view[start : start + size])
            if kind == _GROW:
                self._resize(value)
            elif kind == _BATCH:
                self._unpacker.set_structure(text)  # also from an aborted run: it is not sent again
            # Anything else is left from an earlier run, of which only sizes and structures still matter.
            if number == self.number and kind != _GROW:
                break
            self._post_receive()
        if kind == _STOP:
            return None
        if kind == _ABORT:
            raise RuntimeError(_LEFT)
        if kind == _ERROR:
            raise RuntimeError(
                f"{_READER} failed: {text.decode()} (its traceback is in the output of process 0)."
            )
        batch = self._unpacker.unpack(self._buffer[start + size :])
        if not last:
            self._post_receive()
        count = self.num_data_ranks
        step_rows = StepRows(tuple(counts[:count]), tuple(counts[count:])) if has_rows else None
        return Message(batch, step_rows, bool(last))

    def _post_receive(self) -> None:
        if not self._receives:
            # Posted early: the message arrives while this process works with the previous batch.
            work = dist.irecv(self._buffer, 0, group=self.dispatch_group.process_group, tag=self._tag)
            self._receives.append((work, self._buffer))

    def _wait(self) -> None:
        work, _ = self._receives.pop()
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(_EXITED.format(_READER, _first_line(error))) from error

    def _resize(self, capacity: int) -> None:
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu")
        self._view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]


_EMPTY = Packet(b"", [])
_EXITED = "{} has exited; no more batches can be sent ({}). See its output for the reason."
_READER = "Process 0, which reads the data for all processes,"
_LEFT = (
    f"{_READER} has left the loop over this loader, but this process requests another batch. All processes "
    "must leave a loop at the same batch. If process 0 failed, see its output."
)


def _keep_unfinished(dispatch_group: DispatchGroup, slots: list[_SendBuffer]) -> None:
    for send_buffer in slots:
        dispatch_group.unfinished.extend(send_buffer.sent)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _timeout(default: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of the user's process group."""
    for device in default._device_types:  # torch has no public method for this
        options = getattr(default._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None
