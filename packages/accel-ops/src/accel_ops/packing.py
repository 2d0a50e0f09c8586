"""Packing many small tensors into one buffer of bytes, so that they travel in one collective.

Data movement needs no arithmetic, so a pack holds tensors of all dtypes side by side: the tensors of each
dtype are laid end to end, dtypes with larger elements first. Every part then starts at a multiple of its
element size, also in the rows of a gathered buffer, because the end is padded likewise.

The cost of a small collective is that of the calls into torch. So what depends on shapes and dtypes alone is
worked out once and remembered, and what can be done for all tensors in one call is not done one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

__all__ = ["BUFFER_BYTES", "SHARED_BYTES", "SMALL_BYTES", "Pack", "Part", "Plan", "as_bytes", "plan"]

SMALL_BYTES = 128 * 1024
"""Tensors up to this size (bytes) are packed; beyond it copying costs more than one more collective."""

BUFFER_BYTES = 64 * 1024 * 1024
"""A pack is closed when the buffer for it has reached this size (bytes), which bounds the extra memory."""

SHARED_BYTES = 32 * 1024
"""Results that are together no larger than this (bytes) stay in one block of memory; others get their own.

Own memory costs an allocation and a copy for each tensor; shared memory stays as long as one of them does.
"""

_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_split_with_sizes_copy: Any = torch.split_with_sizes_copy  # torch's annotation says it returns nothing
_shape, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


@dataclass(frozen=True)
class Part:
    """The tensors of one dtype in a pack.

    They are laid end to end row by row where all have rows of one shape, which takes a single call; else
    element by element.

    Args:
        dtype: Their dtype.
        device: Where they are.
        positions: Which ones of all the tensors they are.
        shapes: Their shapes.
        copies: How many of each come back (one from every process if they are gathered).
    """

    dtype: torch.dtype
    device: torch.device
    positions: Sequence[int]
    shapes: Sequence[torch.Size]
    copies: int

    @cached_property
    def nbytes(self) -> int:
        """Their size, once."""
        return sum(self.sizes) * self.dtype.itemsize

    @cached_property
    def sizes(self) -> list[int]:
        """Their numbers of elements."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def row_shape(self) -> torch.Size | None:
        """The shape of their rows, if it is one."""
        rows = {shape[1:] if shape else None for shape in self.shapes}
        return rows.pop() if len(rows) == 1 else None

    @cached_property
    def lengths(self) -> list[int]:
        """Their numbers of rows, else of elements."""
        return self.sizes if self.row_shape is None else [shape[0] for shape in self.shapes]

    @cached_property
    def result_lengths(self) -> list[int]:
        """The numbers of rows, else of elements, that come back."""
        return [self.copies * length for length in self.lengths]

    @cached_property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes that come back: copies are put together along the first dimension."""
        if self.copies == 1:
            return [tuple(shape) for shape in self.shapes]
        return [(self.copies * shape[0], *shape[1:]) if shape else (self.copies,) for shape in self.shapes]

    @cached_property
    def order(self) -> torch.Tensor:
        """Where in all the copies the rows (else elements) of each tensor are, one tensor after the other."""
        place = torch.arange(sum(self.result_lengths), device=self.device).view(
            self.copies, sum(self.lengths)
        )
        return torch.cat([columns.reshape(-1) for columns in torch.split(place, self.lengths, 1)])

    def lay_out(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay the tensors of this part end to end.

        Args:
            tensors: All the tensors that `plan` saw.

        Returns:
            Their elements. It may share memory with the tensor if there is one only.
        """
        own = tensors
        if len(tensors) != len(self.positions):
            own = [tensors[i] for i in self.positions]
        if self.row_shape is not None:
            return torch.cat(own)  # type: ignore[arg-type]
        return _flatten_dense_tensors(own)  # type: ignore[no-untyped-call,no-any-return]

    def take_apart(self, elements: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make the tensors that come back, of elements of which no other part of the program knows.

        Args:
            elements: A contiguous tensor with all elements of the first tensor, of the second, and so on.

        Returns:
            The tensors, as independent for autograd as if they had been made one by one.
        """
        if self.row_shape is not None:
            elements = elements.view(sum(self.result_lengths), *self.row_shape)
        if elements.nbytes <= SHARED_BYTES:
            pieces: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(elements, self.result_lengths)
        else:
            pieces = _split_with_sizes_copy(elements, self.result_lengths)
        return pieces if self.row_shape is not None else self._in_shape(pieces)

    def put_together(self, copies: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make the tensors that come back, of whole copies of this part.

        Args:
            copies: A uint8 tensor of shape (self.copies, self.nbytes).

        Returns:
            The tensors.
        """
        if not self.nbytes:
            return [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in self.result_shapes]
        if copies.nbytes > SHARED_BYTES:  # the only copy: each tensor's pieces go into memory of its own
            return self._in_shape(_split_with_sizes_copy(copies.view(self.dtype), self.sizes, 1))
        words = copies.view(_WORDS[self.dtype.itemsize])  # of any dtype, also of those that cannot be indexed
        rows = words.reshape(sum(self.result_lengths), -1)
        if self.copies > 1:
            rows = rows.index_select(0, self.order)
        return self.take_apart(rows.view(self.dtype))

    def _in_shape(self, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # In place, because a view would cost three times as much and be a view for autograd.
        shaped = zip(pieces, self.result_shapes, strict=True)
        return [piece.resize_(*shape) if shape else piece.resize_(()) for piece, shape in shaped]


@dataclass(frozen=True)
class Pack:
    """Tensors that travel together.

    Args:
        parts: Their parts, those with the largest elements first.
        copies: How many packs come back.
    """

    parts: Sequence[Part]
    copies: int

    @cached_property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.parts[0].device

    @cached_property
    def nbytes(self) -> int:
        """Size of the buffer, with its padding."""
        alignment = self.parts[0].dtype.itemsize
        return -(-sum(part.nbytes for part in self.parts) // alignment) * alignment

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of the tensors.

        Args:
            tensors: All the tensors that `plan` saw.

        Returns:
            A 1-dimensional uint8 tensor of `nbytes` elements. It may share memory with a tensor.
        """
        laid_out = [as_bytes(part.lay_out(tensors)) for part in self.parts]
        if len(laid_out) == 1:
            return laid_out[0]
        missing = self.nbytes - sum(part.nbytes for part in self.parts)
        return torch.cat([*laid_out, torch.zeros(missing, dtype=torch.uint8, device=self.device)])

    def empty(self) -> torch.Tensor:
        """Return an uninitialised 1-dimensional uint8 tensor for the bytes that come back."""
        return torch.empty(self.copies * self.nbytes, dtype=torch.uint8, device=self.device)

    def unpack(self, buffer: torch.Tensor, into: list[Any]) -> None:
        """Make the tensors that come back.

        Args:
            buffer: The packs that came back, one after the other.
            into: Where they are put, at the positions of the tensors that `plan` saw.
        """
        copies = buffer.view(self.copies, self.nbytes)
        start = 0
        for part in self.parts:
            own = copies if len(self.parts) == 1 else copies[:, start : start + part.nbytes]
            start += part.nbytes
            for i, piece in zip(part.positions, part.put_together(own), strict=True):
                into[i] = piece


@dataclass(frozen=True)
class Plan:
    """Which tensors travel together, and which ones alone.

    Args:
        packs: The packs of small tensors.
        large: The positions of the large tensors.
        devices: Where tensors are.
    """

    packs: Sequence[Pack]
    large: Sequence[int]
    devices: Sequence[torch.device]


def plan(tensors: Sequence[torch.Tensor], copies: int = 1) -> Plan:
    """Decide which tensors travel together.

    The answer depends on shapes, dtypes and devices alone, so it is the same on every process.

    Args:
        tensors: The tensors.
        copies: How many of each come back (one from every process if they are gathered).

    Returns:
        The plan.
    """
    devices = tuple(set(map(_device, tensors)))
    if len(devices) > 1:
        devices = tuple(map(_device, tensors))
    return _plan(tuple(map(_shape, tensors)), tuple(map(_dtype, tensors)), devices, copies)


@lru_cache(maxsize=32)
def _plan(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    copies: int,
) -> Plan:
    packs: list[Pack] = []
    large: list[int] = []
    growing: dict[torch.device, tuple[list[int], int]] = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if dtype in _QUANTIZED:
            raise RuntimeError(f"Tensors of {dtype} are more than their bytes.")
        device = devices[i] if len(devices) > 1 else devices[0]
        nbytes = shape.numel() * dtype.itemsize
        if nbytes > SMALL_BYTES:
            large.append(i)
            continue
        members, total = growing.get(device, ([], 0))
        members.append(i)
        if (total + nbytes) * copies < BUFFER_BYTES:
            growing[device] = (members, total + nbytes)
        else:
            packs.append(_pack(members, shapes, dtypes, device, copies))
            growing.pop(device, None)
    packs += [_pack(members, shapes, dtypes, device, copies) for device, (members, _) in growing.items()]
    return Plan(packs, large, sorted(set(devices), key=str))


def _pack(
    members: list[int],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    copies: int,
) -> Pack:
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i in members:
        by_dtype.setdefault(dtypes[i], []).append(i)
    ordered = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)
    parts = [Part(dtype, device, own, [shapes[i] for i in own], copies) for dtype, own in ordered]
    return Pack(parts, copies)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a 1-dimensional uint8 tensor; it is copied only where it is not contiguous."""
    own = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element is contiguous with any stride, which would stay.
    return own.as_strided((own.numel(),), (1,)).view(torch.uint8)
