"""A new file that a thread writes piece by piece, past the system's cache where that is possible.

What goes into the cache costs the processor the copy and the memory for it, and others lose what they had
there: for a checkpoint, which is seldom read again soon, all of that is wasted. Past it (O_DIRECT, open(2))
the disk takes the bytes out of this process's memory; the same is done in FastPersist (Wang et al. 2024,
https://arxiv.org/abs/2406.13768).
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

_PIECES = 4  # that may wait for the disk
_LARGE = 2**16  # for which it pays that numpy frees the interpreter's lock while it copies


class PieceFile(io.RawIOBase):
    """Copies and digests what it is given; a thread writes it, from the beginning to the end.

    Args:
        path: Where the file is.
        thread: The one thread that writes.
        chunk_bytes: Size of a digested chunk.
        cached: Whether the system's cache keeps the file.
        wrote: Called by the thread with the size of each piece that is written.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(
        self, path: Path, thread: Threads, chunk_bytes: int, cached: bool, wrote: Callable[[int], object]
    ) -> None:
        self.error: Exception | None = None
        self._thread, self._wrote = thread, wrote
        self._digests = ChunkDigests(chunk_bytes)
        self._chunks: list[str] = []
        # Pieces with the thread, oldest first, and the one that is being filled.
        self._given: deque[tuple[Future[None], memoryview]] = deque()
        self._piece: memoryview | None = None
        self._used = self._size = 0  # in that piece, in the file
        # Last, and None before: what could not be opened is closed all the same when it is freed.
        self._handle: int | None = None
        self._handle, self._past_cache = _open(path, cached)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were given."""
        return self._size

    def write(self, data: Any, /) -> int:
        """Copy all of the data, and wait where the disk is behind.

        Raises:
            OSError: If the disk has not taken an earlier piece.
        """
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            piece = self._piece = self._free_piece() if self._piece is None else self._piece
            part = rest[: len(piece) - self._used]
            end = self._used + len(part)
            if len(part) < _LARGE:
                piece[self._used : end] = part
            else:
                np.copyto(np.frombuffer(piece[self._used : end], np.uint8), np.frombuffer(part, np.uint8))
            self._used, rest = end, rest[len(part) :]
            if self._used == len(piece):
                self._give()
        self._size += size
        return size

    def close(self) -> None:
        """Have the rest written, wait for it, and close the file; `finish` tells what went wrong."""
        if not self.closed:
            if self._used:
                self._give()
            wait([written for written, _ in self._given])
            super().close()
            if self._handle is not None:
                os.close(self._handle)

    def finish(self) -> tuple[str, ...]:
        """Close the file, unless it is closed.

        Returns:
            The digest of each chunk.

        Raises:
            OSError: If the disk has not taken all of it.
        """
        self.close()
        for written, _ in self._given:
            written.result()
        return (*self._chunks, *self._digests.end())

    def _free_piece(self) -> memoryview:
        if len(self._given) < _PIECES:
            # Memory from the system begins at a page, as the disk needs it. It is shared with processes that
            # are forked, as mmap does by default: a disk may miss what is written to private memory while
            # one is being forked (open(2)).
            memory: Any = mmap.mmap(-1, PIECE_BYTES)
            return memoryview(memory)
        written, piece = self._given.popleft()
        written.result()
        return piece

    def _give(self) -> None:
        assert self._piece is not None
        content = self._piece[: self._used]
        # While the processor still has the piece in its cache.
        self._chunks.extend(self._digests.add(content))
        self._given.append((self._thread.submit(self._write_piece, content), self._piece))
        self._piece, self._used = None, 0

    def _write_piece(self, content: memoryview) -> None:
        if self.error is not None:  # the rest would come to the place of what is missing
            raise self.error
        try:
            rest = content
            while len(rest):
                rest = rest[self._write_some(rest) :]
            self._wrote(len(content))
        except Exception as error:
            self.error = error
            raise

    def _write_some(self, content: memoryview) -> int:
        assert self._handle is not None
        try:
            return os.write(self._handle, content)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._past_cache:
                raise
        # Disks take whole blocks alone, and a file's end is none; a file system may want more than that.
        self._past_cache = False
        _through_cache(self._handle)
        return os.write(self._handle, content)


def _open(path: Path, cached: bool) -> tuple[int, bool]:
    """Open a new file; return its handle, and whether it is written past the cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    # FreeBSD has the flag too, and no list of disks to look at.
    if sys.platform == "linux" and not cached and _is_on_disk(path.parent):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            # The file system has no such files.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags, 0o666), False


def _is_on_disk(folder: Path) -> bool:
    """Whether a folder is on a disk of this machine.

    A server on the network takes several pieces at a time, for which the system's cache is made.
    """
    device = folder.stat().st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def _through_cache(handle: int) -> None:
    # Windows does not have it.
    import fcntl

    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
