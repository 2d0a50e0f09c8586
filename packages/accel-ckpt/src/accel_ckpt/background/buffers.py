"""Copies of the state in memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_ckpt.files.digests import THREADS
from accel_ckpt.files.threads import Threads
from accel_ops.collectives.pack_sections import as_bytes
from accel_state.devices.table import device_spec

if TYPE_CHECKING:
    from concurrent.futures import Future

    from accel_state.process.info import ProcessInfo

# 64 MiB: few mappings for large states, and little unused for small ones.
_SLAB_BYTES = 2**26
# A cache line; torch aligns its memory in the same way.
_ALIGN_BYTES = 64
_PIECE_BYTES = 2**22  # copied by one thread at a time: a slice of a tensor, or many small tensors


class SnapshotBuffer:
    """Memory for copies, reused from save to save, as allocating it takes longer than copying.

    For devices other than the CPU it is pinned, so that the device copies asynchronously.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self.device = process.device
        # Tensors whose asynchronous copy may not be finished: their memory must not be reused before.
        self._sources: list[torch.Tensor] = []
        self._pinned = process.device.type != "cpu"
        # Used front to back, and never freed one by one: `reset` returns to the first for the next save.
        self._slabs: list[memoryview] = []
        # Targets and sources on the CPU, batched until there is enough for one thread.
        self._pieces: list[tuple[Any, Any]] = []
        self._piece_bytes = 0
        self._threads: Threads | None = None
        self._pending: list[Future[None]] = []
        self._slab = self._used = 0

    @property
    def size(self) -> int:
        """The allocated bytes."""
        return sum(slab.nbytes for slab in self._slabs)

    def reset(self) -> None:
        """Reuse the memory; previous copies are lost."""
        self.wait_for_cpu()  # of a save that was interrupted
        self._slab = self._used = 0
        self._sources = []

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor.

        A tensor on the CPU must not change before `wait_for_cpu`, and no copy may be read before
        `synchronize`.

        Args:
            data: A dense tensor.

        Returns:
            Its copy, of the same type and shape, contiguous, on the CPU, with its own storage.
        """
        block = self._allocate(data.numel() * data.element_size())
        copy = block.view(data.dtype).view(data.shape)
        if data.device.type != "cpu":
            # On the device's current stream: the copy includes everything queued before, and nothing after.
            copy.copy_(data.detach(), non_blocking=True)
            self._sources.append(data)
        else:
            self._copy_bytes(block.numpy(), as_bytes(data.detach()).numpy())
        return copy

    def copy_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy the bytes of a storage, as `copy` does."""
        return self.copy(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

    def wait_for_cpu(self) -> None:
        """Wait until the tensors on the CPU are copied."""
        _copy_all(self._pop_pieces())
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()
        pending, self._pending = self._pending, []
        for piece in pending:
            piece.result()

    def synchronize(self) -> None:
        """Wait until all copies are complete, from all devices."""
        self.wait_for_cpu()
        for device in {data.device for data in self._sources}:
            device_spec(device).synchronize(device)
        self._sources = []

    def _copy_bytes(self, copy: Any, data: Any) -> None:
        for start in range(0, copy.size, _PIECE_BYTES):
            piece = slice(start, start + _PIECE_BYTES)
            self._pieces.append((copy[piece], data[piece]))
            self._piece_bytes += self._pieces[-1][0].size
            if self._piece_bytes >= _PIECE_BYTES:
                # At once, so that threads copy while the next tensors are collected.
                if self._threads is None:
                    self._threads = Threads(THREADS, "accel-copy")
                self._pending.append(self._threads.submit(_copy_all, self._pop_pieces()))

    def _pop_pieces(self) -> list[tuple[Any, Any]]:
        pieces, self._pieces, self._piece_bytes = self._pieces, [], 0
        return pieces

    def _allocate(self, size: int) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        while self._slab < len(self._slabs):
            slab = self._slabs[self._slab]
            if self._used + size <= slab.nbytes:
                # Not a view: torch.save writes the full storage of a tensor.
                block = torch.frombuffer(slab, dtype=torch.uint8, offset=self._used, count=size)
                self._used += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
                return block
            self._slab, self._used = self._slab + 1, 0
        self._slabs.append(self._new_slab(max(size, _SLAB_BYTES)))
        return self._allocate(size)

    def _new_slab(self, size: int) -> memoryview:
        if self._pinned:
            try:
                pinned: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
                return memoryview(pinned)
            except (RuntimeError, NotImplementedError):  # devices that share the CPU's memory cannot pin it
                self._pinned = False
        # Anonymous memory of the system: pages cost nothing until they are written.
        pages: Any = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # small pages take longer to allocate than to write
        return memoryview(pages)


def _copy_all(pieces: Iterable[tuple[Any, Any]]) -> None:
    for copy, data in pieces:
        np.copyto(copy, data)
