"""Digests of the parts of a file."""

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

_READ_BYTES = 2**18  # stays in a core's cache


def digest_chunk(
    path: Path, start: int, chunk_bytes: int, algorithm: str = ALGORITHM, mapped: MappedFile | None = None
) -> str:
    """Digest one chunk of a file.

    Args:
        path: The file.
        start: Where the chunk begins, in bytes.
        chunk_bytes: How long it is, unless the file ends before.
        algorithm: One of `ALGORITHMS`.
        mapped: The file where it is mapped: the chunk is digested there if the system has it in its cache.

    Returns:
        Its digest, in hexadecimal.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = ALGORITHMS[algorithm]()
    # Negative where the file has become shorter than the chunk's start: the digest of nothing differs then.
    length = min(chunk_bytes, path.stat().st_size - start)
    if length > 0:
        with nullcontext() if mapped is None else mapped.part(start, length) as part:
            if part is not None:
                digest.update(part)
            else:
                _add_read(digest, path, start, length)
        if mapped is not None and part is None:
            # It is in the cache by now. The other threads wait for the disk meanwhile.
            mapped.bring_in(start, length)
    text: str = digest.hexdigest()
    return text


class ChunkDigests:
    """Digests of the chunks of what it is given, piece by piece.

    Args:
        chunk_bytes: How long a chunk is.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._digest: Any = ALGORITHMS[ALGORITHM]()
        self._room = chunk_bytes  # in the chunk that has begun

    def add(self, data: memoryview) -> Iterator[str]:
        """Add the next bytes ("B"), and yield the digest of each chunk that they fill, in hexadecimal."""
        while len(data):
            part = data[: self._room]
            self._digest.update(part)
            self._room -= len(part)
            data = data[len(part) :]
            if not self._room:
                yield self._end_chunk()

    def end(self) -> Iterator[str]:
        """Yield the digest of the last chunk, if it is shorter than the others."""
        if self._room < self._chunk_bytes:
            yield self._end_chunk()

    def _end_chunk(self) -> str:
        text: str = self._digest.hexdigest()
        self._digest.reset()
        self._room = self._chunk_bytes
        return text


def _add_read(digest: Any, path: Path, start: int, length: int) -> None:
    # Without Python's own buffer, which would be one more copy.
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        buffer = memoryview(bytearray(min(_READ_BYTES, length)))
        while length > 0 and (count := file.readinto(buffer[: min(length, len(buffer))])):
            digest.update(buffer[:count])
            length -= count
