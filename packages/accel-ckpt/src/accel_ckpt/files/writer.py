"""Writing files of a checkpoint, which are digested and flushed to the disk in the background."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, cast

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.file_names import role_of
from accel_ckpt.files import digests
from accel_ckpt.files.digests import CHUNK_BYTES, FileEntry
from accel_ckpt.files.disk import flush
from accel_ckpt.files.hashing import digest_chunk
from accel_ckpt.files.piece_file import PieceFile
from accel_ckpt.files.progress import Progress
from accel_ckpt.files.threads import Threads

_FLUSH_BYTES = 2**26  # unflushed bytes of a file before a flush begins


@dataclass
class _Written:
    chunks: tuple[str, ...] = ()
    read_back: list[Future[str]] = field(default_factory=list)  # chunks of a file that something else wrote
    size: int = 0  # written so far
    flushed: list[Future[None]] = field(default_factory=list)
    identity: tuple[int, int, int] | None = None  # size, time and inode when it was complete
    linked: bool = False  # whether it is a hard link to a file of another checkpoint


class Writer:
    """Writes files, and collects their entries for the manifest.

    Args:
        progress: Counts the written bytes.
        chunk_bytes: Size of a digested chunk.
    """

    def __init__(self, progress: Progress | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._progress = Progress("") if progress is None else progress
        self._chunk_bytes = chunk_bytes
        self._files: dict[Path, _Written] = {}
        self._digest = Threads(digests.THREADS, "accel-digest")
        self._write = Threads(1, "accel-write")
        self._flush = Threads(1, "accel-flush")

    @contextmanager
    def open(self, path: Path, cached: bool = False) -> Iterator[IO[bytes]]:
        """Open a new file that is written sequentially.

        Args:
            path: Its path.
            cached: Whether to write through the page cache; otherwise it is bypassed where possible.

        Yields:
            The file.

        Raises:
            OSError: If it cannot be written.
        """
        written = _Written()
        if path in self._files and self._files[path].linked:
            path.unlink()  # or the file of the other checkpoint would be truncated
        on_written = partial(self._count_written, path, written, cached)
        with closing(PieceFile(path, self._write, self._chunk_bytes, cached, on_written)) as file:
            try:
                yield cast("IO[bytes]", file)
                written.chunks = file.finish()
            except Exception as error:
                # Cleared, as the error's traceback refers to the file, which would never be freed.
                cause, file.error = file.error, None
                if cause is None or cause is error:
                    raise
                raise cause from error  # torch.save does not mention a full disk
        self._complete(path, written)

    def add_existing(self, path: Path) -> None:
        """Add a complete file that something else wrote.

        Args:
            path: Its path.
        """
        written = _Written()
        # Usually still in the page cache.
        for start in range(0, path.stat().st_size, self._chunk_bytes):
            written.read_back.append(
                # Not a callback of the future, which would create a reference cycle with this writer.
                self._digest.submit(_digest_and_count, path, start, self._chunk_bytes, self._progress)
            )
        self._complete(path, written)

    def digest(self, path: Path, start: int, length: int) -> Future[str]:
        """Digest a chunk of a file in this writer's threads.

        Args:
            path: The path of the file.
            start: The start of the chunk, in bytes.
            length: Its length, unless the file ends before.

        Returns:
            The future of its digest, or of an OSError.
        """
        return self._digest.submit(digest_chunk, path, start, length)

    def link(self, path: Path, chunks: Iterable[str]) -> None:
        """Add a file that is a link to one of another checkpoint.

        Args:
            path: Its path.
            chunks: Its verified digests.
        """
        written = _Written(tuple(chunks), linked=True)
        self._progress.add(self._chunk_bytes * len(written.chunks))
        self._complete(path, written)

    def entries(self, folder: Path) -> list[FileEntry]:
        """Wait until all files are digested and flushed, and return their entries.

        Args:
            folder: The checkpoint's folder.

        Returns:
            The manifest's entry of each file that is unchanged since it was written.

        Raises:
            OSError: If a file cannot be read back, or not be written.
            CorruptCheckpointError: If a linked file was changed.
        """
        for written in self._files.values():
            # Disk errors often show only in fsync, so every flush's result is checked.
            for flushed in written.flushed:
                flushed.result()
        described = []
        for path, written in self._files.items():
            chunks = written.chunks or tuple(chunk.result() for chunk in written.read_back)
            name = path.relative_to(folder).as_posix()
            identity = _identity(path) if path.exists() else None
            if written.linked and identity != written.identity and identity and written.identity:
                _check_replaced(path, identity[-1], written.identity[-1])
            # A hook may have rewritten the file: `seal` then digests it again.
            if identity is not None and written.identity == identity:
                described.append(FileEntry(name, path.stat().st_size, role_of(name), chunks))
        return described

    def close(self) -> None:
        """End the threads."""
        for threads in (self._digest, self._write, self._flush):
            threads.close()

    def _count_written(self, path: Path, written: _Written, cached: bool, size: int) -> None:
        """Count the written bytes of a file, and flush it regularly if it is in the page cache."""
        self._progress.add(size)
        written.size += size
        if cached and (len(written.flushed) + 1) * _FLUSH_BYTES <= written.size:
            written.flushed.append(self._flush.submit(_flush_if_exists, path))

    def _complete(self, path: Path, written: _Written) -> None:
        written.identity = _identity(path)
        written.flushed.append(self._flush.submit(_flush_if_exists, path))
        self._files[path] = written


def _flush_if_exists(path: Path) -> None:
    with suppress(FileNotFoundError):  # a hook has deleted or replaced it
        flush(path)


def _digest_and_count(path: Path, start: int, chunk_bytes: int, progress: Progress) -> str:
    text = digest_chunk(path, start, chunk_bytes)
    progress.add(chunk_bytes)
    return text


def _check_replaced(path: Path, inode: int, linked: int) -> None:
    if inode == linked:
        raise CorruptCheckpointError(
            f"{path.name} was changed while it was linked, and with it the file of the previous checkpoint. "
            "A hook that writes such a file must delete it first."
        )


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
