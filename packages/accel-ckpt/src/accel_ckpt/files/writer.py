"""Writing files of a checkpoint: their bytes are digested and flushed to the disk while more is written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.file_names import role_of
from accel_ckpt.files import digests
from accel_ckpt.files.digests import CHUNK_BYTES, FileEntry
from accel_ckpt.files.disk import flush
from accel_ckpt.files.hashing import digest_chunk
from accel_ckpt.files.progress import Progress
from accel_ckpt.files.threads import Threads

# torch.save writes headers of a few bytes between its tensors.
_BUFFER_BYTES = 2**20
_FLUSH_BYTES = 2**26  # how far the disk is behind at most, before a flush begins


@dataclass
class _Written:
    chunks: list[Future[str]] = field(default_factory=list)
    flushed: list[Future[None]] = field(default_factory=list)
    identity: tuple[int, int, int] | None = None  # size, time and inode when it was complete
    linked: bool = False  # whether another checkpoint has the same file


class Writer:
    """Writes files for a manifest, and knows their digests when they are written.

    Args:
        progress: Where written bytes are counted.
        chunk_bytes: Size of a digested chunk.
    """

    def __init__(self, progress: Progress | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._progress = Progress("") if progress is None else progress
        self._chunk_bytes = chunk_bytes
        self._files: dict[Path, _Written] = {}
        self._digest = Threads(digests.THREADS, "accel-digest")
        self._disk = Threads(1, "accel-flush")

    @contextmanager
    def open(self, path: Path) -> Iterator[IO[bytes]]:
        """Open a new file to be written from its beginning to its end.

        Args:
            path: Where it is.

        Yields:
            The file.

        Raises:
            OSError: If the disk does not take it.
        """
        written = _Written()
        if path in self._files and self._files[path].linked:
            path.unlink()  # or the file of the other checkpoint would be cut off
        raw = _Raw(path, lambda size: self._advance(path, written, size))
        # BufferedWriter gathers small pieces and passes large ones on as they are.
        try:
            with io.BufferedWriter(raw, _BUFFER_BYTES) as file:
                yield cast("IO[bytes]", file)
        except Exception as error:
            if raw.error is None or raw.error is error:
                raise
            raise raw.error from error  # torch.save says nothing of a full disk
        self._complete(path, written)

    def follow(self, path: Path) -> None:
        """Add a file that something else has written to its end.

        Args:
            path: Where it is.
        """
        self._complete(path, _Written())

    def digest(self, path: Path, start: int, length: int) -> Future[str]:
        """Have a chunk of a file digested by this writer's threads.

        Args:
            path: Where the file is.
            start: Where the chunk begins, in bytes.
            length: How long it is, unless the file ends before.

        Returns:
            Its digest, or an OSError, later.
        """
        return self._digest.submit(digest_chunk, path, start, length)

    def link(self, path: Path, chunks: Iterable[str]) -> None:
        """Add a file that is a link to one of another checkpoint.

        Args:
            path: Where it is.
            chunks: Its digests, which have been checked.
        """
        written = _Written(identity=_identity(path), linked=True)
        for chunk in chunks:
            known: Future[str] = Future()
            known.set_result(chunk)
            written.chunks.append(known)
            self._progress.add(self._chunk_bytes)
        written.flushed.append(self._disk.submit(flush, path))
        self._files[path] = written

    def entries(self, folder: Path) -> list[FileEntry]:
        """Wait until all files are digested and flushed.

        Args:
            folder: The checkpoint's folder.

        Returns:
            What the manifest says about each file that is still as it was written.

        Raises:
            OSError: If a file cannot be read back, or the disk does not take it.
            CorruptCheckpointError: If something has changed a linked file since.
        """
        for written in self._files.values():
            # An error of the disk often shows in fsync alone, so that every flush's result is asked for.
            for flushed in written.flushed:
                flushed.result()
        described = []
        for path, written in self._files.items():
            chunks = tuple(chunk.result() for chunk in written.chunks)
            name = path.relative_to(folder).as_posix()
            identity = _identity(path) if path.exists() else None
            if written.linked and identity != written.identity and identity and written.identity:
                _check_replaced(path, identity[-1], written.identity[-1])
            # A hook may have rewritten the file since: `seal` then digests it anew.
            if identity is not None and written.identity == identity:
                described.append(FileEntry(name, path.stat().st_size, role_of(name), chunks))
        return described

    def close(self) -> None:
        """End the threads."""
        self._digest.close()
        self._disk.close()

    def _advance(self, path: Path, written: _Written, size: int) -> None:
        """Digest the chunks that are full, now that the file has `size` bytes."""
        # Only full chunks: bytes that are still to come would change the digest of the last one.
        while (len(written.chunks) + 1) * self._chunk_bytes <= size:
            self._digest_next(path, written)
        if (len(written.flushed) + 1) * _FLUSH_BYTES <= size:
            written.flushed.append(self._disk.submit(flush, path))

    def _digest_next(self, path: Path, written: _Written) -> None:
        start = len(written.chunks) * self._chunk_bytes
        # Read back out of the system's cache, so that no buffer has to be kept until then.
        # Not a callback of the future: that would keep this writer, which keeps the future, in a cycle.
        written.chunks.append(
            self._digest.submit(_digest_and_count, path, start, self._chunk_bytes, self._progress)
        )

    def _complete(self, path: Path, written: _Written) -> None:
        written.identity = _identity(path)
        while len(written.chunks) * self._chunk_bytes < written.identity[0]:
            self._digest_next(path, written)
        written.flushed.append(self._disk.submit(flush, path))
        self._files[path] = written


class _Raw(io.RawIOBase):
    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        self._handle = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666
        )
        self._advance, self._size = advance, 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            # May be less than was given; BufferedWriter calls again with the rest.
            count = os.write(self._handle, data)
        except OSError as error:
            self.error = error
            raise
        self._size += count
        self._advance(self._size)
        return count

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                os.close(self._handle)


def _digest_and_count(path: Path, start: int, chunk_bytes: int, progress: Progress) -> str:
    text = digest_chunk(path, start, chunk_bytes)
    progress.add(chunk_bytes)
    return text


def _check_replaced(path: Path, inode: int, linked: int) -> None:
    if inode == linked:
        raise CorruptCheckpointError(
            f"{path.name} was changed while it was linked, and with it the file of the earlier checkpoint. A "
            "hook that writes such a file must delete it first."
        )


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
