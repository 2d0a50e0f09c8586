"""Handing batches from process 0 to the others, in one scatter of bytes per step.

Each process gets a buffer of the same size: a header, the structure of its batch if it has changed since the
last one it got, and the bytes of its tensors. When a batch does not fit, the buffers grow first. Leaves that
are no plain tensors travel inside the structure.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel_ops import contract
from accel_ops.tree import TensorInformation, is_tensor_information, recursively_apply
from accel_state.process import Process

__all__ = ["ABSENT", "Channel", "Encoded", "Message"]

ABSENT: Any = object()
"""Stands for the batch of a process that has none in the last step."""

_BATCH, _GROW, _STOP, _ERROR = range(4)
_FIELDS = 5  # of the header, before the real samples: kind, value, last, bytes of the structure, padded
_PAGE = 4096  # buffers grow to a multiple of this (bytes)


class Message(NamedTuple):
    """What process 0 has for one process in one step.

    Args:
        batch: The batch.
        real: How many samples of each process are real; None if none is padded.
        last: Whether this is the last step.
    """

    batch: Any
    real: tuple[int, ...] | None
    last: bool


class Encoded(NamedTuple):
    """A batch that is ready to be sent.

    Args:
        structure: The pickled tree with the shapes of its tensors; empty if it is that of the batch before.
        tensors: Its tensors.
    """

    structure: bytes
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors)


class Channel:
    """The way from process 0 to all processes.

    Args:
        process: The facts of this process.
        owners: For each process of the run, which part of a step it gets (several may get the same one).
    """

    def __init__(self, process: Process, owners: Sequence[int]) -> None:
        self.process = process
        self.owners = list(owners)
        self.num_parts = max(owners) + 1
        # gloo and MPI move CPU memory; the others that of the device.
        on_cpu = process.backend is None or any(name in process.backend for name in ("gloo", "mpi"))
        self.device = torch.device("cpu") if on_cpu else process.device
        self._sent: list[bytes | None] = [None] * self.num_parts
        self._structure: Any = None
        self._resize(8 * (_FIELDS + self.num_parts))

    def encode(self, parts: Sequence[Any]) -> list[Encoded | None]:
        """Make the batches of one step ready to be sent (process 0).

        Args:
            parts: The batch of each part; ABSENT where it has none, so that the loop of its processes ends.

        Returns:
            What `send` takes. A batch that cannot be pickled raises here, while the others can still be told.
        """
        return [None if part is ABSENT else self._encode(number, part) for number, part in enumerate(parts)]

    def send(self, encoded: Sequence[Encoded | None], real: tuple[int, ...] | None, last: bool) -> None:
        """Hand out one step (process 0).

        Args:
            encoded: What `encode` returned.
            real: See `Message`.
            last: See `Message`.
        """
        self._grow(max(part.nbytes for part in encoded if part is not None))
        counts = list(real) if real else [0] * self.num_parts
        for buffer, part in zip(self._parts, encoded, strict=True):
            text, tensors = part or Encoded(b"", [])
            kind = _STOP if part is None else _BATCH
            self._write(buffer, [kind, 0, last, len(text), real is not None, *counts], text, tensors)
        self._scatter()

    def stop(self) -> None:
        """Tell the others that there is no batch (process 0)."""
        self._announce(_STOP)

    def fail(self, error: BaseException) -> None:
        """Tell the others that process 0 cannot go on (process 0)."""
        text = f"{type(error).__name__}: {error}".encode()
        self._grow(len(text))
        self._announce(_ERROR, text)

    def receive(self) -> Message | None:
        """Get one step (other processes).

        Returns:
            This process's batch; None if there is none.

        Raises:
            RuntimeError: If process 0 could not read it.
        """
        kind = _GROW
        while kind == _GROW:
            self._scatter()
            kind, value, last, size, padded, *real = (
                self._buffer[: self._header].cpu().view(torch.int64).tolist()
            )
            if kind == _GROW:
                self._resize(value)
        if kind == _STOP:
            return None
        content = self._buffer[self._header :]
        text = content[:size].cpu().numpy().tobytes()
        if kind == _ERROR:
            raise RuntimeError(
                f"Process 0, which reads the data for all processes, failed: {text.decode()} (its traceback "
                "is in the output of process 0)."
            )
        if size:
            self._structure = pickle.loads(text)
        return Message(self._decode(content[size:]), tuple(real) if padded else None, bool(last))

    def _encode(self, number: int, part: Any) -> Encoded:
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> TensorInformation:
            tensors.append(tensor)
            return TensorInformation(tensor.shape, tensor.dtype)

        if number not in self.owners[1:]:  # only process 0 itself gets it
            return Encoded(b"", [])
        structure = pickle.dumps(recursively_apply(note, part, test_type=_is_plain))
        if structure == self._sent[number]:
            return Encoded(b"", tensors)
        self._sent[number] = structure
        return Encoded(structure, tensors)

    def _decode(self, content: torch.Tensor) -> Any:
        position = 0

        def fill(info: TensorInformation) -> torch.Tensor:
            nonlocal position
            start, position = position, position + info.shape.numel() * info.dtype.itemsize
            # A copy: a small tensor that is kept must not keep the whole buffer.
            return content[start:position].clone().view(info.dtype).view(info.shape)

        return recursively_apply(fill, self._structure, test_type=is_tensor_information)

    def _grow(self, size: int) -> None:
        needed = self._header + size
        if needed > self._capacity:
            capacity = -(-needed // _PAGE) * _PAGE
            self._announce(_GROW, value=capacity)
            self._resize(capacity)

    def _announce(self, kind: int, text: bytes = b"", value: int = 0) -> None:
        for buffer in self._parts:
            self._write(buffer, [kind, value, 0, len(text), 0, *[0] * self.num_parts], text, [])
        self._scatter()

    @property
    def _header(self) -> int:
        return 8 * (_FIELDS + self.num_parts)

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        count = self.num_parts if self.process.is_main else 0
        self._parts = [torch.empty(capacity, dtype=torch.uint8) for _ in range(count)]

    def _write(
        self, buffer: torch.Tensor, header: list[int], text: bytes, tensors: Sequence[torch.Tensor]
    ) -> None:
        buffer[: self._header].view(torch.int64).copy_(torch.tensor(header))
        position = self._header
        pieces = [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
        for piece in (*pieces, *map(_as_bytes, tensors)):
            buffer[position : position + len(piece)].copy_(piece)
            position += len(piece)

    def _scatter(self) -> None:
        if self.process.debug:
            contract.check("dispatch", None, process=self.process)
        if not self.process.is_main:
            dist.scatter(self._buffer, src=0)
            return
        parts = [part.to(self.device) for part in self._parts]
        dist.scatter(self._buffer, [parts[owner] for owner in self.owners], src=0)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_plain(leaf: Any) -> bool:
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided
    return plain and not leaf.is_nested and not leaf.is_quantized
