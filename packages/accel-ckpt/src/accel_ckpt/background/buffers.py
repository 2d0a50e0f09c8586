"""Copies of state in memory, out of which a checkpoint is written while training goes on."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_ckpt.files.digests import THREADS
from accel_ckpt.files.threads import Threads
from accel_ops.collectives.pack_parts import as_bytes
from accel_state.devices.table import row

if TYPE_CHECKING:
    from accel_state.process.facts import Process

# 64 MiB: few mappings for large states, and little unused for small ones.
_SLAB_BYTES = 2**26
# A cache line; torch aligns its own memory so too.
_ALIGN_BYTES = 64
_PIECE_BYTES = 2**22  # that one thread copies
# Enough for all threads; more would only put the copying off.
_WAITING_BYTES = 2**28


class Memory:
    """Memory for copies. It is kept from one save to the next, as new memory costs more than the copying.

    For devices other than the CPU it is pinned, so that the device copies into it by itself.

    Args:
        process: This process.
    """

    def __init__(self, process: Process) -> None:
        self.device = process.device
        self._sources: set[torch.device] = set()  # that copy by themselves
        self._pinned = process.device.type != "cpu"
        # Filled front to back, and never freed singly: `begin` goes back to the first for the next save.
        self._slabs: list[memoryview] = []
        # Sources and targets of copies on the CPU, collected so that several threads copy many at once.
        self._waiting: list[tuple[Any, Any]] = []
        self._waiting_bytes = 0
        self._slab = self._used = 0

    @property
    def size(self) -> int:
        """How many bytes are held."""
        return sum(slab.nbytes for slab in self._slabs)

    def begin(self) -> None:
        """Use the memory anew; earlier copies are lost."""
        self._slab = self._used = self._waiting_bytes = 0
        self._waiting = []
        self._sources.clear()

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Copy a tensor. It must not change before `copy_waiting`, nor the copy be read before `finish`.

        Args:
            data: A dense tensor.

        Returns:
            Its copy, of the same type and shape, contiguous, on the CPU, with a storage of its own.
        """
        size = data.numel() * data.element_size()
        copy = self._take(size).view(data.dtype).view(data.shape)
        if data.device.type != "cpu":
            copy.copy_(data.detach(), non_blocking=True)
            self._sources.add(data.device)
            return copy
        self._waiting.append((as_bytes(copy).numpy(), as_bytes(data.detach()).numpy()))
        self._waiting_bytes += size
        if self._waiting_bytes > _WAITING_BYTES:
            self.copy_waiting()
        return copy

    def copy_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy the bytes of a storage, as `copy`."""
        return self.copy(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

    def copy_waiting(self) -> None:
        """Copy the tensors on the CPU that wait for it; several threads take half the time of one."""
        if not self._waiting:
            return
        with Threads(THREADS, "accel-copy") as threads:
            pending = [
                threads.submit(
                    np.copyto, copy[start : start + _PIECE_BYTES], data[start : start + _PIECE_BYTES]
                )
                for copy, data in self._waiting
                for start in range(0, copy.size, _PIECE_BYTES)
            ]
        for piece in pending:
            piece.result()
        self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> None:
        """Wait until all copies are there, from whichever devices they come."""
        self.copy_waiting()
        for device in self._sources:
            row(device).synchronize(device)

    def _take(self, size: int) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        while self._slab < len(self._slabs):
            slab = self._slabs[self._slab]
            if self._used + size <= slab.nbytes:
                # Not a view: torch.save writes the whole storage of a tensor.
                taken = torch.frombuffer(slab, dtype=torch.uint8, offset=self._used, count=size)
                self._used += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
                return taken
            self._slab, self._used = self._slab + 1, 0
        self._slabs.append(self._new(max(size, _SLAB_BYTES)))
        return self._take(size)

    def _new(self, size: int) -> memoryview:
        if self._pinned:
            try:
                pinned: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
                return memoryview(pinned)
            except (RuntimeError, NotImplementedError):  # devices that share the CPU's memory pin none
                self._pinned = False
        # Anonymous memory straight from the system: untouched pages cost nothing until they are written.
        pages: Any = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # small pages take longer to get than to fill
        return memoryview(pages)
