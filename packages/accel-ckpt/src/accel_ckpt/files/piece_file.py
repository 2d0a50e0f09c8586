"""A new file that a thread writes piece by piece, bypassing the page cache where possible.

Writing through the page cache costs a copy and memory, and evicts the pages of other programs: a waste for a
checkpoint, which is seldom read again soon. With O_DIRECT (open(2)) the disk reads the bytes from this
process's memory; FastPersist does the same (Wang et al. 2024, https://arxiv.org/abs/2406.13768).
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np

from accel_ckpt.files.hashing import ChunkDigests
from accel_ckpt.files.threads import Threads

PIECE_BYTES = 2**22
"""How much is written at once. Disks take larger pieces no faster."""

_PIECES = 4  # in the queue of the disk at most
_LARGE = 2**16  # from which copying by numpy, which releases the GIL, is worthwhile


class PieceFile(io.RawIOBase):
    """Copies and digests the bytes written to it; a thread writes them sequentially to the disk.

    Args:
        path: The path of the file.
        thread: The thread that writes.
        chunk_bytes: Size of a digested chunk.
        cached: Whether to write through the page cache.
        on_written: Called by the thread with the size of each written piece.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self, path: Path, thread: Threads, chunk_bytes: int, cached: bool, on_written: Callable[[int], object]
    ) -> None:
        self.error: Exception | None = None
        self._thread, self._on_written = thread, on_written
        self._digests = ChunkDigests(chunk_bytes)
        self._chunks: list[str] = []
        # Pieces submitted to the thread, oldest first, and the current one.
        self._submitted: deque[tuple[Future[None], memoryview]] = deque()
        self._piece: memoryview | None = None
        self._used = self._size = 0  # in the current piece, in the file
        # Last, and None before: `close` is also called for a file that could not be opened.
        self._handle: int | None = None
        self._handle, self._bypasses_cache = _open(path, cached)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def write(self, data: Any, /) -> int:
        """Copy all data, and wait if the disk is behind.

        Raises:
            OSError: If a previous piece could not be written.
        """
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            piece = self._piece = self._free_piece() if self._piece is None else self._piece
            slice_ = rest[: len(piece) - self._used]
            end = self._used + len(slice_)
            if len(slice_) < _LARGE:
                piece[self._used : end] = slice_
            else:
                np.copyto(np.frombuffer(piece[self._used : end], np.uint8), np.frombuffer(slice_, np.uint8))
            self._used, rest = end, rest[len(slice_) :]
            if self._used == len(piece):
                self._submit()
        self._size += size
        return size

    def close(self) -> None:
        """Write the rest, wait for it, and close the file; `finish` raises the errors."""
        if not self.closed:
            if self._used:
                self._submit()
            wait([written for written, _ in self._submitted])
            super().close()
            if self._handle is not None:
                os.close(self._handle)

    def finish(self) -> tuple[str, ...]:
        """Close the file, unless it is closed.

        Returns:
            The digest of each chunk.

        Raises:
            OSError: If a piece could not be written.
        """
        self.close()
        for written, _ in self._submitted:
            written.result()
        return (*self._chunks, *self._digests.end())

    def _free_piece(self) -> memoryview:
        if len(self._submitted) < _PIECES:
            # Memory of mmap is aligned to pages, as O_DIRECT requires. It is shared with forked processes,
            # the default of mmap: the disk may miss writes to private memory during a fork (open(2)).
            memory: Any = mmap.mmap(-1, PIECE_BYTES)
            return memoryview(memory)
        written, piece = self._submitted.popleft()
        written.result()
        return piece

    def _submit(self) -> None:
        assert self._piece is not None
        content = self._piece[: self._used]
        # While the piece is still in the CPU's cache.
        self._chunks.extend(self._digests.add(content))
        self._submitted.append((self._thread.submit(self._write_piece, content), self._piece))
        self._piece, self._used = None, 0

    def _write_piece(self, content: memoryview) -> None:
        if self.error is not None:  # the rest would be written at the offset of the missing piece
            raise self.error
        try:
            rest = content
            while len(rest):
                rest = rest[self._write_some(rest) :]
            self._on_written(len(content))
        except Exception as error:
            self.error = error
            raise

    def _write_some(self, content: memoryview) -> int:
        assert self._handle is not None
        try:
            return os.write(self._handle, content)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._bypasses_cache:
                raise
        # O_DIRECT needs full blocks, and the end of a file is not one; a file system may require more.
        self._bypasses_cache = False
        _disable_direct(self._handle)
        return os.write(self._handle, content)


def _open(path: Path, cached: bool) -> tuple[int, bool]:
    """Open a new file; return its handle, and whether it bypasses the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    # FreeBSD has the flag too, but no list of disks to check.
    if sys.platform == "linux" and not cached and _is_on_disk(path.parent):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            # The file system does not support it.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags, 0o666), False


def _is_on_disk(folder: Path) -> bool:
    """Whether a folder is on a disk of this machine.

    A network file system writes several pieces at a time, which needs the page cache.
    """
    device = folder.stat().st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def _disable_direct(handle: int) -> None:
    # Not available on Windows.
    import fcntl

    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
