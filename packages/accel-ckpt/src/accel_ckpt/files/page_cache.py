"""A part of a file, seen where it lies in the system's cache.

A mapped page that cannot be brought in (the disk fails, somebody has cut the file off) is no error but kills
the process, so only what is in the cache already is used in this way, and only with a lease: whoever wants to
cut the file off waits until it is given back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any


@contextmanager
def cached_part(path: Path, start: int, length: int) -> Iterator[memoryview | None]:
    """Map a part of a file for the block, if the system has all of it in its cache and gives a lease on it.

    Args:
        path: The file.
        start: Where the part begins, in bytes.
        length: How long it is, in bytes; at least 1.

    Yields:
        The part; None if not all of it is in the cache, or the system does not say; or if there is no lease:
        somebody has the file open for writing, it is another user's, or its file system has none.

    Raises:
        OSError: If the file cannot be opened.
    """
    # A mapping begins at a multiple of this (a page on Linux, 64 KiB on Windows).
    skipped = start % mmap.ALLOCATIONGRANULARITY
    # Before the file is mapped, so that what is mapped is there until the end of the block.
    with open(path, "rb", buffering=0) as file, _lease(file.fileno()) as leased:
        try:
            pages = (
                mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_COPY, offset=start - skipped)
                if leased
                else None
            )
        except (OSError, ValueError):  # a file system that maps nothing; a file that ends before
            pages = None
        if pages is None:
            yield None
            return
        with pages:
            if not _are_cached(pages, path):
                yield None
                return
            # Both views must be released before the mapping: mmap.close raises BufferError while one is
            # exported.
            with memoryview(pages) as view, view[skipped:] as part:
                yield part


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


def _are_cached(pages: mmap.mmap, path: Path) -> bool:
    ask = _mincore()
    if ask is None or not os.access(path, os.W_OK):  # the kernel says "all of them" to others
        return False
    # mincore writes a byte per page, whose lowest bit says that it is there. No array of ctypes, which makes
    # a class for each length: classes are in reference cycles, and wait for the garbage collector.
    answer = bytearray(-(-len(pages) // mmap.PAGESIZE))
    # ctypes takes an address from writable buffers only, hence ACCESS_COPY above, though nothing is written.
    first, states = ctypes.c_char.from_buffer(pages), ctypes.c_char.from_buffer(answer)
    failed = ask(ctypes.byref(first), ctypes.c_size_t(len(pages)), ctypes.byref(states))
    return not failed and answer.count(1) == len(answer)


@cache
def _mincore() -> Any:
    """Linux's call for which pages are in memory (mincore(2)); None elsewhere."""
    return getattr(ctypes.CDLL(None), "mincore", None) if sys.platform == "linux" else None
