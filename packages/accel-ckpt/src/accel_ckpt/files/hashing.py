"""Digests of the chunks of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import xxhash

from accel_ckpt.files.mapped_file import MappedFile

ALGORITHM = "xxh3_128"
"""The digest algorithm of new checkpoints."""

ALGORITHMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""The digest algorithms that checkpoints may have, by their names in the manifest."""

_READ_BYTES = 2**18  # fits into a core's cache


def digest_chunk(
    path: Path, start: int, chunk_bytes: int, algorithm: str = ALGORITHM, mapped: MappedFile | None = None
) -> str:
    """Digest one chunk of a file.

    Args:
        path: The file.
        start: The start of the chunk, in bytes.
        chunk_bytes: Its length, unless the file ends before.
        algorithm: One of `ALGORITHMS`.
        mapped: The mapped file: the chunk is digested there if it is in the page cache.

    Returns:
        The digest, in hexadecimal.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = ALGORITHMS[algorithm]()
    # Negative if the file has become shorter than the chunk's start: then the digest of nothing differs.
    length = min(chunk_bytes, path.stat().st_size - start)
    if length > 0:
        with nullcontext() if mapped is None else mapped.view(start, length) as view:
            if view is not None:
                digest.update(view)
            else:
                _add_read(digest, path, start, length)
        if mapped is not None and view is None:
            # It is in the page cache now. The other threads wait for the disk meanwhile.
            mapped.prefault(start, length)
    text: str = digest.hexdigest()
    return text


class ChunkDigests:
    """Digests the chunks of a file, whose bytes are added in pieces of any length.

    Args:
        chunk_bytes: The length of a chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._digest: Any = ALGORITHMS[ALGORITHM]()
        self._room = chunk_bytes  # in the current chunk

    def add(self, data: memoryview) -> Iterator[str]:
        """Add the next bytes ("B"), and yield the digest of each completed chunk, in hexadecimal."""
        while len(data):
            piece = data[: self._room]
            self._digest.update(piece)
            self._room -= len(piece)
            data = data[len(piece) :]
            if not self._room:
                yield self._end_chunk()

    def end(self) -> Iterator[str]:
        """Yield the digest of the last chunk, if it is shorter than a full one."""
        if self._room < self._chunk_bytes:
            yield self._end_chunk()

    def _end_chunk(self) -> str:
        text: str = self._digest.hexdigest()
        self._digest.reset()
        self._room = self._chunk_bytes
        return text


def _add_read(digest: Any, path: Path, start: int, length: int) -> None:
    # Without Python's buffer, which would be another copy.
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        buffer = memoryview(bytearray(min(_READ_BYTES, length)))
        while length > 0 and (count := file.readinto(buffer[: min(length, len(buffer))])):
            digest.update(buffer[:count])
            length -= count
