"""A part of a file, seen where it lies in the system's cache.

A mapped page that cannot be brought in (the disk fails, somebody has cut the file off) is no error but kills
the process, so only what is in the cache already is used in this way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["cached_part"]


@contextmanager
def cached_part(path: Path, start: int, length: int) -> Iterator[memoryview | None]:
    """Map a part of a file for the block, if the system has all of it in its cache.

    Args:
        path: The file.
        start: Where the part begins, in bytes.
        length: How long it is, in bytes; at least 1.

    Yields:
        The part; None if not all of it is in the cache, or the system does not say.

    Raises:
        OSError: If the file cannot be opened.
    """
    # A mapping begins at a multiple of this (a page on Linux, 64 KiB on Windows).
    skipped = start % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb", buffering=0) as file:
        try:
            pages = mmap.mmap(
                file.fileno(), skipped + length, access=mmap.ACCESS_COPY, offset=start - skipped
            )
        except (OSError, ValueError):  # a file system that maps nothing; a file that ends before
            yield None
            return
    with pages:
        if not _are_cached(pages, path):
            yield None
            return
        # Both views must be released before the mapping: mmap.close raises BufferError while one is exported.
        with memoryview(pages) as view, view[skipped:] as part:
            yield part


def _are_cached(pages: mmap.mmap, path: Path) -> bool:
    ask = _mincore()
    if ask is None or not os.access(path, os.W_OK):  # the kernel says "all of them" to others
        return False
    # mincore writes a byte per page, whose lowest bit says that it is there.
    answer = ctypes.create_string_buffer(-(-len(pages) // mmap.PAGESIZE))
    # ctypes takes an address from writable buffers only, hence ACCESS_COPY above, though nothing is written.
    first = ctypes.c_char.from_buffer(pages)
    failed = ask(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(pages)), answer)
    return not failed and answer.raw.count(1) == len(answer)


@cache
def _mincore() -> Any:
    """Linux's call for which pages are in memory (mincore(2)); None elsewhere."""
    return getattr(ctypes.CDLL(None), "mincore", None) if sys.platform == "linux" else None
