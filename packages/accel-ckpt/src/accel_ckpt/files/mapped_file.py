"""A file of torch.save in memory: mapped once, to be checked there and loaded from there.

What a digest has read is then in its place, and loading finds it there. A mapped page that cannot be brought
in (the disk fails, somebody has cut the file off) is no error but kills the process. So a part is used only
once the system has brought it in, and only with a lease: whoever wants to cut the file off waits until it is
given back.
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

# Of madvise(2), from Linux 5.14 on: brings pages in, and fails where one cannot be read.
_MADV_POPULATE_READ = 22
_SAMPLE_BYTES = 2**20  # between the pages that are asked for; asking for all takes as long as a digest


class MappedFile:
    """A file that is mapped: writing to its memory changes no file.

    Args:
        path: A regular file, not empty.

    Raises:
        OSError: If the file is not there.
        RuntimeError: If it cannot be mapped, or changes meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        before = path.stat()
        self._storage: Any = torch.UntypedStorage.from_file(str(path), False, before.st_size)
        self._identity = _identity(before)
        self._check_same(path.stat())
        # Named, as the user's default device may be another one.
        empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
        whole: Any = empty.set_(self._storage).numpy()
        self._bytes = memoryview(whole)

    @contextmanager
    def part(self, start: int, length: int) -> Iterator[memoryview | None]:
        """Have a part of the file in memory for the block, if the system has it in its cache.

        Once the file has been loaded, it has what was written to the tensors since.

        Args:
            start: Where the part begins, in bytes.
            length: How long it is, in bytes; at least 1.

        Yields:
            The part; None if it is not in the cache, or the system does not say; if the file is no longer
            what was mapped; or if there is no lease: somebody has it open for writing, it is another user's,
            or its file system has none.

        Raises:
            OSError: If the file cannot be opened.
        """
        # Before the part is brought in, so that it is there until the end of the block.
        with open(self.path, "rb", buffering=0) as file, _lease(file.fileno()) as leased:
            same = leased and _identity(os.fstat(file.fileno())) == self._identity
            there = same and start + length <= len(self._bytes)
            there = there and self._is_cached(start, length) and self.bring_in(start, length)
            yield self._bytes[start : start + length] if there else None

    def load(self, map_location: Any) -> Any:
        """Load what the file holds, as `torch.load(mmap=True, weights_only=True)`. Its tensors stay in place.

        Args:
            map_location: As there.

        Returns:
            What was saved.

        Raises:
            Exception: Any, if the file is damaged, holds other objects, or torch has changed. torch.load says
                better what is wrong.
        """
        # torch.load is this and a mapping of its own, in which each page has to be found anew.
        function: Any = torch.serialization._load
        module = torch._weights_only_unpickler
        options: dict[str, Any] = {"weights_only": True} if _is_told(function) else {}  # from torch 2.15 on
        with open(self.path, "rb") as file:
            self._check_same(os.fstat(file.fileno()))
            with torch.serialization._open_zipfile_reader(file) as archive:
                return function(
                    archive, map_location, module, overall_storage=self._storage, encoding="utf-8", **options
                )

    def _check_same(self, status: os.stat_result) -> None:
        if _identity(status) != self._identity:
            raise RuntimeError(f"{self.path} has changed since it was mapped")

    def bring_in(self, start: int, length: int) -> bool:
        """Have the system bring a part in, so that who reads it finds it in its place.

        Args:
            start: Where the part begins, in bytes.
            length: How long it is, in bytes.

        Returns:
            Whether it is there; False also where the system cannot be asked.
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
        """Whether a part seems to be in the system's cache; reading is faster from the disk."""
        calls = _calls()
        if calls is None:
            return False
        first, length = self._pages(start, length)
        # mincore writes a byte for each page, whose lowest bit says that it is in the cache.
        state = ctypes.c_ubyte()
        for place in range(first, first + length, _SAMPLE_BYTES):
            if calls.mincore(ctypes.c_void_p(place), ctypes.c_size_t(1), ctypes.byref(state)):
                return False
            if not state.value & 1:
                return False
        return True

    def _pages(self, start: int, length: int) -> tuple[int, int]:
        """Return the address of the page in which a part begins, and how far it is from there to its end."""
        skipped = start % mmap.PAGESIZE
        return self._storage.data_ptr() + start - skipped, length + skipped


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _lease(file: int) -> Iterator[bool]:
    """Keep others from opening a file for writing and from cutting it off, if the system can (fcntl(2))."""
    if sys.platform != "linux":
        yield False
        return
    # Windows does not have it.
    import fcntl

    try:
        # The signal of whoever waits: by default this one is ignored, and the usual one ends the process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        # Not by closing alone: a process forked meanwhile has the file open too.
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@cache
def _calls() -> Any:
    """Return the C library if it has Linux's calls for pages, mincore(2) and madvise(2); else None."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mincore") and hasattr(library, "madvise") else None


@cache
def _is_told(function: Any) -> bool:
    return "weights_only" in inspect.signature(function).parameters
