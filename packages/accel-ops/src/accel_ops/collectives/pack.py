"""Packing many small tensors into one buffer of bytes, so that they are sent in one collective.

Data movement needs no arithmetic, so a pack has tensors of all dtypes: the tensors of each dtype are
concatenated into a section, dtypes with larger elements first. Every section then starts at a multiple of its
element size, also in the rows of a gathered buffer, because the end is padded too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from accel_ops.collectives.pack_sections import SHARED_BYTES, Section

SMALL_BYTES = 64 * 1024
"""Tensors up to this size (bytes) are packed.

Measured: copying larger ones takes longer than one more collective.
"""

BUFFER_BYTES = 64 * 1024 * 1024
"""A pack is closed when the buffer for it has reached this size (bytes), which bounds the extra memory."""

# Scale and zero point are not among their bytes.
_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_shape, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")


class Buffers(NamedTuple):
    """Memory of one pack in flight, with its views.

    Args:
        sent: The bytes of this process: a uint8 tensor of shape (nbytes,).
        received: The bytes of all copies, one after the other: of shape (copies * nbytes,). Of one copy it
            is `sent`.
        targets: The view of each section in `sent`; see `Section.view_in`.
        copies: The views of each section's copies in `received`.
    """

    sent: torch.Tensor
    received: torch.Tensor
    targets: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Pack:
    """Tensors that are sent in one collective.

    Args:
        sections: Their sections, those with the largest elements first.
        copies: How many packs come back.
    """

    sections: Sequence[Section]
    copies: int
    _kept: list[Buffers] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.sections[0].device

    @cached_property
    def nbytes(self) -> int:
        """Size of what is sent, with its padding."""
        alignment = self.sections[0].dtype.itemsize
        return -(-sum(section.nbytes for section in self.sections) // alignment) * alignment

    def buffers(self) -> Buffers:
        """Return unused buffers: those passed to `keep`, or new ones."""
        try:
            return self._kept.pop()  # one call, so that two threads never get the same ones
        except IndexError:
            with torch.inference_mode(False):  # buffers made inside it could not be written outside
                return self._make_buffers()

    def keep(self, buffers: Buffers) -> None:
        """Keep buffers for the next time. Nothing reads or writes them any more.

        Args:
            buffers: What `buffers` returned.
        """
        # Small ones alone, as plans are remembered for long. On other devices a stream may still use them.
        if self.copies * self.nbytes <= SHARED_BYTES and self.device.type == "cpu":
            self._kept[:] = [buffers]

    def pack(self, tensors: Sequence[torch.Tensor], buffers: Buffers) -> None:
        """Lay the tensors out in what is sent.

        Args:
            tensors: All the tensors that `plan` saw.
            buffers: What `buffers` returned.
        """
        for section, target in zip(self.sections, buffers.targets, strict=True):
            section.write(tensors, target)

    def unpack(self, buffers: Buffers, into: list[Any]) -> None:
        """Make the tensors that come back, in new memory.

        Args:
            buffers: With the packs that came back in `received`.
            into: Where they are put, at the positions of the tensors that `plan` saw.
        """
        for section, copies in zip(self.sections, buffers.copies, strict=True):
            pieces = section.concatenate_copies(copies)
            # All tensors are in this section, in order: one slice assignment instead of a loop.
            if len(pieces) == len(into):
                into[:] = pieces
                return
            for i, piece in zip(section.positions, pieces, strict=True):
                into[i] = piece

    def _make_buffers(self) -> Buffers:
        sent = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        received = sent if self.copies == 1 else sent.new_empty(self.copies * self.nbytes)
        rows = received.view(self.copies, self.nbytes)
        ends = list(accumulate(section.nbytes for section in self.sections))
        spans = [slice(end - section.nbytes, end) for section, end in zip(self.sections, ends, strict=True)]
        targets = [section.view_in(sent[span]) for section, span in zip(self.sections, spans, strict=True)]
        copies = [section.view_in(rows[:, span]) for section, span in zip(self.sections, spans, strict=True)]
        return Buffers(sent, received, targets, copies)


@dataclass(frozen=True)
class Plan:
    """Which tensors are packed, and which are sent separately.

    Args:
        packs: The packs of small tensors.
        large: The positions of the large tensors.
        devices: Where tensors are.
    """

    packs: Sequence[Pack]
    large: Sequence[int]
    devices: Sequence[torch.device]


def plan(tensors: Sequence[torch.Tensor], copies: int = 1) -> Plan:
    """Decide which tensors are packed.

    The answer depends on shapes, dtypes and devices alone, so it is the same on every process.

    Args:
        tensors: The tensors.
        copies: How many of each come back (one from every process if they are gathered).

    Returns:
        The plan.
    """
    devices = tuple(set(map(_device, tensors)))
    # One device needs no tuple of all of them, which would be hashed in every call.
    if len(devices) > 1:
        devices = tuple(map(_device, tensors))
    return _plan(tuple(map(_shape, tensors)), tuple(map(_dtype, tensors)), devices, copies)


# A loop gathers the same few trees again and again.
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
        # Counted as it comes back, from all processes: that buffer is the larger one.
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
    # Larger elements first: then every section starts at a multiple of its element size.
    ordered = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)
    sections = [
        Section(dtype, device, positions, [shapes[i] for i in positions], copies)
        for dtype, positions in ordered
    ]
    return Pack(sections, copies)
