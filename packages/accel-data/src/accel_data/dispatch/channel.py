"""Handing batches from process 0 to the others, in one message per process and step.

The messages go through a process group of their own, so that they do not mix with the user's collectives, and
may be sent by another thread while these run. Each process gets its own part: a header, the structure of its
batch if that has changed, and the bytes of its tensors. The next message is on its way while a batch is used:
process 0 does not wait until one has arrived before it sends the next, and the others ask for the next one as
soon as they have taken one. When a message does not fit, the receivers' buffers grow first.

A pass that is left early leaves messages behind. They carry the number of their pass, and are passed over.
gloo needs the memory of a message until it has arrived, also if nobody wants it any more.
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

from accel_data.dispatch.wire import Packer, Packet, Unpacker, check_alike
from accel_data.order.layout import StepRows

ABSENT: Any = object()
"""Stands for the batch of a process that has none in the last step."""

# Kinds of messages. Numbers rather than an Enum: they are packed into the header of every message.
_BATCH, _GROW, _STOP, _LEAVE, _ERROR = range(5)
_FIELDS = 6  # of the header, before the fill: pass, kind, value, last, bytes of structure, is known
_PAGE = 4096  # buffers grow to a multiple of this (bytes)


_Sent = tuple[Any, torch.Tensor]
"""Something on the way, and its memory."""


class Message(NamedTuple):
    """The batch that process 0 sends to one process in one step.

    Args:
        batch: The batch.
        fill: What the processes have in this step; None if every process has a full batch.
        last: Whether this is the last step.
    """

    batch: Any
    fill: StepRows | None
    last: bool


@dataclass(frozen=True)
class Line:
    """The process group that messages go through.

    Args:
        group: The group.
        tags: Gives each loader a number of its own, the same on all processes, which make them in one order.
        kept: What is still on the way for loaders that are no more.
    """

    group: dist.ProcessGroup
    tags: itertools.count[int] = field(default_factory=itertools.count)
    kept: list[_Sent] = field(default_factory=list)


_lines: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()


def open_line() -> Line:
    """Return the line that goes with the present default process group; all processes make it together.

    Raises:
        RuntimeError: If torch was built without gloo, which moves the messages on any hardware: they hold
            what lies in the memory of the CPU.
    """
    default = dist.group.WORLD
    assert default is not None
    if default not in _lines:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "Process 0 hands out batches through gloo, without which this torch was built. Install one "
                "that has it, or pass dispatch_batches=False."
            )
        group = dist.new_group(backend="gloo", timeout=_timeout(default), group_desc="accel_data")
        _lines[default] = Line(group)
    return _lines[default]


class _Slot:
    """The memory of one step's messages, which are on their way."""

    def __init__(self) -> None:
        self.sent: list[_Sent] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def pack(self, part: int, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Put the pieces of a message into one buffer, shape (nbytes,)."""
        size = sum(map(len, pieces))
        buffer = self._buffers.get(part)
        if buffer is None or len(buffer) < size:
            # With some room, so that a batch that is slightly larger needs no other buffer.
            buffer = self._buffers[part] = torch.empty(size + size // 4, dtype=torch.uint8, device="cpu")
        return torch.cat(pieces, out=buffer[:size])

    def wait(self) -> None:
        """Wait until all have got theirs."""
        sent, self.sent = self.sent, []
        try:
            for work, _ in sent:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(_GONE.format("A process", _first_line(error))) from error


class Sender:
    """The side of process 0.

    Args:
        line: Where messages go through.
        owners: For each process of the run, which part of a step it gets (several may get the same one).
    """

    def __init__(self, line: Line, owners: Sequence[int]) -> None:
        self.line = line
        self.owners = list(owners)
        self.num_parts = max(owners) + 1
        self.number = 0
        self.is_open = False
        self._tag = next(line.tags)
        self._packers = {part: Packer() for part in sorted(set(self.owners[1:]))}
        # q: signed 64-bit integers throughout, so that no field needs padding. Receiver has the same.
        self._header = struct.Struct(f"{_FIELDS + 2 * self.num_parts}q")
        self._capacity = _PAGE
        # Two, as one is filled while the messages of the other are on their way.
        self._slots = [_Slot(), _Slot()]
        # gloo reads the memory of an isend until it is done: freed before, it would
        # send whatever lies there then.
        finalize(self, _keep_sent, line, self._slots)

    def begin(self) -> int:
        """Begin a pass.

        Returns:
            Its number.
        """
        if self.is_open:
            self.leave()
        self.number += 1
        self.is_open = True
        return self.number

    def pack(self, parts: Sequence[Any]) -> dict[int, Packet | None]:
        """Make the batches of one step ready to be sent.

        Args:
            parts: The batch of each part; ABSENT where it has none, so that the loop of its processes ends.

        Returns:
            What `send` takes, for the parts that other processes get.

        Raises:
            TypeError: If a batch cannot be sent, or one differs in structure from another; nothing has been
                sent then, so that `fail` reaches the others.
        """
        there = [part for part in parts if part is not ABSENT]
        check_alike(there)
        try:
            return {
                number: None if parts[number] is ABSENT else packer.pack(parts[number])
                for number, packer in self._packers.items()
            }
        except Exception:
            for packer in self._packers.values():
                packer.forget()
            raise

    def send(self, packets: dict[int, Packet | None], fill: StepRows | None, last: bool) -> None:
        """Hand out one step.

        Args:
            packets: What `pack` returned.
            fill: See `Message`.
            last: See `Message`.

        Raises:
            RuntimeError: If a process is gone.
        """
        slot = self._next_slot()
        self._grow(max(map(self._size, packets.values()), default=0), slot)
        counts = (*fill.real, *fill.rows) if fill else (0,) * 2 * self.num_parts
        for part, packet in packets.items():
            kind, (text, tensors) = (_STOP, _EMPTY) if packet is None else (_BATCH, packet)
            header = self._header.pack(self.number, kind, 0, last, len(text), fill is not None, *counts)
            content = [torch.frombuffer(bytearray(header + text), dtype=torch.uint8), *tensors]
            self._post(slot, part, slot.pack(part, content))
        self.is_open = not last

    def stop(self) -> None:
        """Send to the others that there is no batch."""
        self._announce(self._next_slot(), _STOP)
        self.is_open = False

    def fail(self, error: BaseException) -> None:
        """Send to the others that process 0 cannot go on."""
        text = f"{type(error).__name__}: {error}".encode()
        with suppress(RuntimeError):  # some may be gone
            slot = self._next_slot()
            self._grow(self._header.size + len(text), slot)
            self._announce(slot, _ERROR, text)
        self.is_open = False

    def leave(self) -> None:
        """Wait until all have got what they asked for, and send on if this process left the loop early."""
        with suppress(RuntimeError):  # some may be gone
            for slot in self._slots:
                slot.wait()
            if self.is_open:
                self._announce(self._slots[0], _LEAVE)
        self.is_open = False

    def _size(self, packet: Packet | None) -> int:
        return self._header.size + (0 if packet is None else packet.nbytes)

    def _grow(self, size: int, slot: _Slot) -> None:
        if size > self._capacity:
            # At least twice as large, so that buffers grow a few times only in a run.
            self._capacity = -(-max(size, 2 * self._capacity) // _PAGE) * _PAGE
            self._announce(slot, _GROW, value=self._capacity)

    def _announce(self, slot: _Slot, kind: int, text: bytes = b"", value: int = 0) -> None:
        header = self._header.pack(self.number, kind, value, 0, len(text), 0, *[0] * 2 * self.num_parts)
        content = torch.frombuffer(bytearray(header + text), dtype=torch.uint8)
        for part in self._packers:
            self._post(slot, part, content)

    def _post(self, slot: _Slot, part: int, content: torch.Tensor) -> None:
        for rank, owner in enumerate(self.owners[1:], 1):
            if owner == part:
                try:
                    work = dist.isend(content, rank, group=self.line.group, tag=self._tag)
                    slot.sent.append((work, content))
                except (RuntimeError, ValueError) as error:  # the latter if the group has been destroyed
                    raise RuntimeError(_GONE.format(f"Process {rank}", _first_line(error))) from error

    def _next_slot(self) -> _Slot:
        """Return the memory of the step before the last one, once all have got that."""
        # The one that was used last comes second, so that its messages have a whole step to arrive.
        self._slots.reverse()
        self._slots[0].wait()
        return self._slots[0]


class Receiver:
    """The side of another process.

    Args:
        line: Where messages go through.
        owners: As for `Sender`.
    """

    def __init__(self, line: Line, owners: Sequence[int]) -> None:
        self.line = line
        self.number = 0
        self._tag = next(line.tags)
        self.num_parts = max(owners) + 1
        self._header = struct.Struct(f"{_FIELDS + 2 * self.num_parts}q")
        # Keeps the structure from batch to batch: it is sent only when it has changed.
        self._unpacker = Unpacker()
        self._asked: list[_Sent] = []
        self._resize(_PAGE)
        finalize(self, line.kept.extend, self._asked)

    def begin(self) -> int:
        """Begin a pass.

        Returns:
            Its number.
        """
        self.number += 1
        self._ask()
        return self.number

    def receive(self) -> Message | None:
        """Get one step.

        Returns:
            This process's batch; None if there is none.

        Raises:
            RuntimeError: If process 0 could not read it, has left the loop, or is gone.
        """
        while True:
            self._wait()
            number, kind, value, last, size, is_known, *counts = self._header.unpack_from(self._view)
            start = self._header.size
            text = bytes(self._view[start : start + size])
            if kind == _GROW:
                self._resize(value)
            elif kind == _BATCH:
                self._unpacker.learn(text)  # also from a pass that was left: it is not sent again
            # Anything else is left over from an earlier pass; only sizes and structures in it still matter.
            if number == self.number and kind != _GROW:
                break
            self._ask()
        if kind == _STOP:
            return None
        if kind == _LEAVE:
            raise RuntimeError(_LEFT)
        if kind == _ERROR:
            raise RuntimeError(
                f"{_READER} failed: {text.decode()} (its traceback is in the output of process 0)."
            )
        batch = self._unpacker.unpack(self._buffer[start + size :])
        if not last:
            self._ask()
        parts = self.num_parts
        fill = StepRows(tuple(counts[:parts]), tuple(counts[parts:])) if is_known else None
        return Message(batch, fill, bool(last))

    def _ask(self) -> None:
        if not self._asked:
            # Before it is needed: the message arrives while this process works with the batch before.
            work = dist.irecv(self._buffer, 0, group=self.line.group, tag=self._tag)
            self._asked.append((work, self._buffer))

    def _wait(self) -> None:
        work, _ = self._asked.pop()
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(_GONE.format(_READER, _first_line(error))) from error

    def _resize(self, capacity: int) -> None:
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu")
        self._view = memoryview(self._buffer.numpy())  # type: ignore[arg-type]


_EMPTY = Packet(b"", [])
_GONE = "{} is gone, so that no more batches can be handed out ({}). See its output for the reason."
_READER = "Process 0, which reads the data for all processes,"
_LEFT = (
    f"{_READER} has left the loop over this loader, but this process wants another batch. All processes must "
    "leave a loop at the same batch. If process 0 failed, see its output."
)


def _keep_sent(line: Line, slots: list[_Slot]) -> None:
    for slot in slots:
        line.kept.extend(slot.sent)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _timeout(default: dist.ProcessGroup) -> timedelta | None:
    """Return how long the user lets processes wait for each other."""
    for device in default._device_types:  # torch has no public way to ask
        options = getattr(default._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    return None
