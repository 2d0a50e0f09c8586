"""Incremental saves: a file whose bytes are unchanged since the previous checkpoint is hard-linked to it.

A hard link is a second name of the same bytes: either checkpoint can be deleted, and the other stays
complete. Three things must match: the bytes to write, the digests in the previous manifest, and the bytes on
the disk under the previous name. The latter are read for each link, as the file may have been changed since:
other threads read each chunk as soon as the bytes to write match its digest.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files.digests import CHUNK_BYTES, FileEntry, plain_file
from accel_ckpt.files.hashing import ALGORITHM, ChunkDigests
from accel_ckpt.folder import manifest
from accel_state.logging.warning import warn

_Digest = Callable[[Path, int, int], "Future[str]"]


@dataclass(frozen=True)
class PreviousCheckpoint:
    """The checkpoint that a new one may link files to.

    Args:
        folder: Its folder.
        entries: The manifest's entry of each file, by path.
    """

    folder: Path
    entries: Mapping[str, FileEntry]

    def is_small(self, name: str) -> bool:
        """Return whether this checkpoint has a file of this name, of one chunk at most."""
        return name in self.entries and self.entries[name].size <= CHUNK_BYTES

    def link(
        self, name: str, destination: Path, write: Callable[[IO[bytes]], object], digest: _Digest
    ) -> FileEntry | None:
        """Link a file, if this checkpoint has the same bytes under the same name.

        Args:
            name: The file's path inside both checkpoints.
            destination: Where the link goes.
            write: Writes the file; called to compare its bytes, up to the first difference.
            digest: Digests a chunk of a file in the background, from its start and length.

        Returns:
            The manifest's entry of the file; None if it was not linked and must be written.

        Raises:
            Exception: What `write` raises.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        # Read after linking: another file may take the previous name meanwhile; this is the linked one.
        try:
            os.link(plain_file(self.folder, name), destination)
        # Another file system, or one without links, or its limit is reached; or the file is gone.
        except (OSError, CheckpointError):
            return None
        changed_ns = destination.stat().st_mtime_ns
        digests: list[Future[str]] = []
        is_intact = False
        try:
            if not _writes_same_bytes(
                write, entry, lambda start: digests.append(digest(destination, start, CHUNK_BYTES))
            ):
                return None
            is_intact = _is_intact(destination, name, entry, digests, changed_ns)
        finally:
            # Or the next write would change the file of the previous checkpoint.
            if not is_intact:
                destination.unlink()
        if not is_intact:
            warn(
                f"{self.folder} is damaged: its {name} is no longer what was saved. The new checkpoint is "
                "not affected: the file is written again.",
                about="process",
            )
        return entry if is_intact else None


def small_content(write: Callable[[IO[bytes]], object]) -> memoryview | None:
    """Return the bytes that a function writes, or None if they exceed one chunk.

    Args:
        write: The function.

    Raises:
        Exception: What `write` raises.
    """
    content = _SmallContent()
    try:
        write(content)
    except Exception:
        # torch.save raises its own errors when a write fails.
        if not content.is_full:
            raise
    return None if content.is_full else content.getbuffer()


def find_previous(target: Path) -> PreviousCheckpoint | None:
    """Find the checkpoint that a new one may link files to.

    Args:
        target: The folder of the new one.

    Returns:
        The newest complete one, in that folder or next to it; None if there is none, or if it has digests of
        another algorithm or chunk size.
    """
    newest: tuple[int, Path] | None = None
    for folder in [target, *(target.parent.iterdir() if target.parent.is_dir() else ())]:
        # Hidden ones are being written or deleted.
        if folder != target and folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # not a checkpoint, or not readable
            found = ((folder / MANIFEST).stat().st_mtime_ns, folder)
            newest = found if newest is None else max(newest, found)
    if newest is None:
        return None
    try:
        described = manifest.read(newest[1])
    except (CheckpointError, OSError):  # damaged; loading says so
        return None
    if described is None or (described.algorithm, described.chunk_bytes) != (ALGORITHM, CHUNK_BYTES):
        return None
    return PreviousCheckpoint(newest[1], {entry.path: entry for entry in described.files})


def _is_intact(path: Path, name: str, entry: FileEntry, digests: list[Future[str]], changed_ns: int) -> bool:
    """Whether a linked file matches its manifest entry, and has not changed since it was linked."""
    folder = path.parents[len(Path(name).parts) - 1]
    try:
        found_digests = tuple(chunk.result() for chunk in digests)
        # After the digests, as a chunk may change after it was read. The path may have become a symbolic
        # link.
        status = plain_file(folder, name).stat()
        return (status.st_size, status.st_mtime_ns, found_digests) == (entry.size, changed_ns, entry.chunks)
    except (OSError, CheckpointError):  # the disk cannot read it
        return False


def _writes_same_bytes(
    write: Callable[[IO[bytes]], object], entry: FileEntry, on_same_chunk: Callable[[int], object]
) -> bool:
    """Whether a function writes the bytes of a manifest entry; it is stopped at the first difference.

    Args:
        write: The function.
        entry: The manifest entry.
        on_same_chunk: Called with the start of each equal chunk.
    """
    compared = _ByteComparison(entry, on_same_chunk)
    try:
        write(cast("IO[bytes]", compared))
    except Exception:
        # torch.save raises its own errors when a write fails.
        if not compared.differs:
            raise
    return compared.is_same()


class _ByteComparison(io.RawIOBase):
    """A file that compares the digests of the bytes written to it with those of a manifest entry."""

    def __init__(self, entry: FileEntry, on_same_chunk: Callable[[int], object]) -> None:
        self._entry, self._found_same = entry, on_same_chunk
        self._digests = ChunkDigests(CHUNK_BYTES)
        self._size = self._same = 0  # in bytes, in chunks
        self.differs = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        content = memoryview(data).cast("B")
        self._size += len(content)
        self._compare(self._digests.add(content))
        return len(content)

    def is_same(self) -> bool:
        with contextlib.suppress(_DifferentBytesError):
            self._compare(self._digests.end())
        return not self.differs and self._size == self._entry.size

    def _compare(self, chunks: Iterator[str]) -> None:
        for text in chunks:
            if self.differs or self._entry.chunks[self._same : self._same + 1] != (text,):
                self.differs = True
                raise _DifferentBytesError
            self._found_same(self._same * CHUNK_BYTES)
            self._same += 1


class _SmallContent(io.BytesIO):
    """A file in memory of one chunk at most."""

    is_full = False

    def write(self, data: Any, /) -> int:
        self.is_full = self.is_full or self.tell() + memoryview(data).nbytes > CHUNK_BYTES
        if self.is_full:
            raise _DifferentBytesError
        return super().write(data)


class _DifferentBytesError(Exception):
    """Raised when the bytes written differ from those of the previous file, or exceed them."""
