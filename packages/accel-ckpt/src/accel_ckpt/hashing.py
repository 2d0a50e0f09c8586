"""The digest of a part of a file, at the speed of memory where the system has the file in its cache."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

__all__ = ["ALGORITHM", "ALGORITHMS", "digest_chunk"]

ALGORITHM = "xxh3_128"
"""What new checkpoints are digested with."""

ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""What digests of checkpoints may be, by the name that the manifest gives them."""

_READ_BYTES = 2**20  # stays in a core's cache


def digest_chunk(path: Path, start: int, chunk_bytes: int, algorithm: str = ALGORITHM) -> str:
    """Digest one chunk of a file.

    Args:
        path: The file.
        start: Where the chunk begins, in bytes.
        chunk_bytes: How long it is, unless the file ends before.
        algorithm: One of `ALGORITHMS`.

    Returns:
        Its digest, in hexadecimal.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = ALGORITHMS[algorithm]()
    with open(path, "rb", buffering=0) as file:
        length = min(chunk_bytes, os.fstat(file.fileno()).st_size - start)
        if length <= 0 or not _add_cached(digest, file.fileno(), start, length):
            file.seek(start)
            buffer = memoryview(bytearray(max(0, min(_READ_BYTES, length))))
            while length > 0 and (count := file.readinto(buffer[: min(length, len(buffer))])):
                digest.update(buffer[:count])
                length -= count
    text: str = digest.hexdigest()
    return text


def _add_cached(digest: Any, handle: int, start: int, length: int) -> bool:
    """Digest a part of a file where it lies in the system's cache; return False if it is not there.

    What is mapped and cannot be read from the disk is no error, but kills the process.
    """
    skipped = start % mmap.ALLOCATIONGRANULARITY
    try:
        pages = mmap.mmap(handle, skipped + length, access=mmap.ACCESS_COPY, offset=start - skipped)
    except OSError:  # some file systems map nothing
        return False
    with pages:
        if not _is_cached(pages, skipped + length):
            return False
        with memoryview(pages) as view, view[skipped:] as part:
            digest.update(part)
    return True


def _is_cached(pages: mmap.mmap, size: int) -> bool:
    ask = _mincore()
    if ask is None:
        return False
    count = -(-size // mmap.PAGESIZE)
    answer = ctypes.create_string_buffer(count)
    place = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    return ask(ctypes.c_void_p(place), ctypes.c_size_t(size), answer) == 0 and answer.raw.count(1) == count


@cache
def _mincore() -> Any:
    """The system's call that tells which pages are in memory; None where there is none."""
    if os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), "mincore", None)
