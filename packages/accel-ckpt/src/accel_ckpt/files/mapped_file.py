"""A memory-mapped file of torch.save, which is digested and loaded from the same mapping.

Pages that a digest has read need not be read again for loading. Touching a mapped page that cannot be read
(the disk fails, or the file was truncated) raises no error but kills the process. So a byte range is only
used once it is prefaulted, and only with a lease: another process that wants to truncate the file waits until
the lease is released.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Of madvise(2), from Linux 5.14 on: reads pages into memory, and fails if one cannot be read.
_MADV_POPULATE_READ = 22
_SAMPLE_BYTES = 2**20  # between the pages that are checked; checking all takes as long as a digest


class MappedFile:
    """A file that is mapped privately: writing to the memory does not change the file.

    Args:
        path: A regular file, not empty.

    Raises:
        OSError: If the file does not exist.
        RuntimeError: If it cannot be mapped, or changes meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        before = path.stat()
        self._storage: Any = torch.UntypedStorage.from_file(str(path), False, before.st_size)
        self._identity = _identity(before)
        self._check_same(path.stat())
        # The device is named, as the user's default device may be another one.
        empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
        array: Any = empty.set_(self._storage).numpy()
        self._bytes = memoryview(array)

    @contextmanager
    def view(self, start: int, length: int) -> Iterator[memoryview | None]:
        """View a byte range of the file during the block, if it is in the page cache.

        After the file was loaded, the range has the values that were written to the tensors since.

        Args:
            start: The start of the range, in bytes.
            length: Its length, in bytes; at least 1.

        Yields:
            The range; None if it is not in the page cache, or this is not known; if the file has changed
            since it was mapped; or if there is no lease: the file is open for writing, belongs to another
            user, or its file system does not support leases.

        Raises:
            OSError: If the file cannot be opened.
        """
        # The lease comes before the prefault, so that the range stays valid until the end of the block.
        with open(self.path, "rb", buffering=0) as file, _lease(file.fileno()) as leased:
            same = leased and _identity(os.fstat(file.fileno())) == self._identity
            usable = same and start + length <= len(self._bytes)
            usable = usable and self._is_cached(start, length) and self.prefault(start, length)
            yield self._bytes[start : start + length] if usable else None

    def load(self, map_location: Any) -> Any:
        """Load the file, as `torch.load(mmap=True, weights_only=True)` does. Its tensors use the mapping.

        Args:
            map_location: As for `torch.load`.

        Returns:
            The saved object.

        Raises:
            Exception: Any, if the file is damaged, contains other objects, or torch has changed. torch.load
                has better error messages.
        """
        # torch.load does the same with a new mapping, in which each page must be faulted in again.
        function: Any = torch.serialization._load
        module = torch._weights_only_unpickler
        options: dict[str, Any] = (
            {"weights_only": True} if _takes_weights_only(function) else {}
        )  # from torch 2.15 on
        with open(self.path, "rb") as file:
            self._check_same(os.fstat(file.fileno()))
            with torch.serialization._open_zipfile_reader(file) as archive:
                return function(
                    archive, map_location, module, overall_storage=self._storage, encoding="utf-8", **options
                )

    def _check_same(self, status: os.stat_result) -> None:
        if _identity(status) != self._identity:
            raise RuntimeError(f"{self.path} has changed since it was mapped")

    def prefault(self, start: int, length: int) -> bool:
        """Prefault a byte range.

        Args:
            start: The start of the range, in bytes.
            length: Its length, in bytes.

        Returns:
            Whether it is in memory; False if the system does not support this.
        """
        calls = _calls()
        length = min(length, len(self._bytes) - start)  # the file may have grown
        if calls is None or length <= 0:
            return False
        first, length = self._pages(start, length)
        return not calls.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_READ)
        )

    def _is_cached(self, start: int, length: int) -> bool:
        """Whether a byte range seems to be in the page cache; otherwise reading the file is faster."""
        calls = _calls()
        if calls is None:
            return False
        first, length = self._pages(start, length)
        # mincore writes a byte for each page, whose lowest bit is set if the page is in the cache.
        state = ctypes.c_ubyte()
        for place in range(first, first + length, _SAMPLE_BYTES):
            if calls.mincore(ctypes.c_void_p(place), ctypes.c_size_t(1), ctypes.byref(state)):
                return False
            if not state.value & 1:
                return False
        return True

    def _pages(self, start: int, length: int) -> tuple[int, int]:
        """Return the address of the first page of a byte range, and the length from there to its end."""
        skipped = start % mmap.PAGESIZE
        return self._storage.data_ptr() + start - skipped, length + skipped


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _lease(file: int) -> Iterator[bool]:
    """Keep other processes from opening a file for writing and truncating it, if supported (fcntl(2))."""
    if sys.platform != "linux":
        yield False
        return
    # Not available on Windows.
    import fcntl

    try:
        # The signal sent when another process waits: SIGURG is ignored by default, the usual one ends the
        # process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        # Closing is not enough: a process forked meanwhile has the file open too.
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@cache
def _calls() -> Any:
    """Return the C library if it has Linux's calls for pages, mincore(2) and madvise(2); else None."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mincore") and hasattr(library, "madvise") else None


@cache
def _takes_weights_only(function: Any) -> bool:
    return "weights_only" in inspect.signature(function).parameters
