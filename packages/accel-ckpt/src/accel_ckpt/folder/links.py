"""Incremental saves: a file that would be written with the bytes it has in an earlier checkpoint is linked.

A hard link is a second name of the same bytes: either checkpoint can be deleted, and the other is whole.
Three things have to agree for it: what would be written now, the digests in the earlier manifest, and what
the disk has under the earlier name. That is read for each link, as somebody may have changed the file since:
by other threads, each chunk as soon as what would be written is found to have the digest of it.
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
    """An earlier checkpoint, to whose files those of a new one may be linked.

    Args:
        folder: Its folder.
        entries: What its manifest says about each file, by path.
    """

    folder: Path
    entries: Mapping[str, FileEntry]

    def is_small(self, name: str) -> bool:
        """Whether this checkpoint has a file under this name, and in one chunk."""
        return name in self.entries and self.entries[name].size <= CHUNK_BYTES

    def link(
        self, name: str, destination: Path, write: Callable[[IO[bytes]], object], digest: _Digest
    ) -> FileEntry | None:
        """Link a file, if what would be written is what this checkpoint has under the same name.

        Args:
            name: The file's path inside both checkpoints.
            destination: Where the link goes.
            write: What would write the file; it is called to compare its bytes, as far as they are the same.
            digest: Has a chunk of a file digested, given its start and length, while this goes on.

        Returns:
            What the manifest says about the file; None if nothing is linked, so that it has to be written.

        Raises:
            Exception: What `write` raises.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        # Read after it is linked: whatever takes the earlier name meanwhile, this is what was linked.
        try:
            os.link(plain_file(self.folder, name), destination)
        # Another file system, or one without links, or as many as it allows; or the file is gone.
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
            # Or what is written next would go into the file of the earlier checkpoint.
            if not is_intact:
                destination.unlink()
        if not is_intact:
            warn(
                f"{self.folder} is damaged: {name} there is no longer what was saved. The new checkpoint "
                "gets the file anew, and is not.",
                about="process",
            )
        return entry if is_intact else None


def small_content(write: Callable[[IO[bytes]], object]) -> memoryview | None:
    """Return what a function writes into a file, or None if it is more than a chunk.

    Args:
        write: The function.

    Raises:
        Exception: What `write` raises.
    """
    content = _SmallContent()
    try:
        write(content)
    except Exception:
        # torch.save raises errors of its own when a file takes no more.
        if not content.is_full:
            raise
    return None if content.is_full else content.getbuffer()


def find_previous(target: Path) -> PreviousCheckpoint | None:
    """Find the checkpoint to whose files those of a new one may be linked.

    Args:
        target: The folder of the new one.

    Returns:
        The newest that is complete, in that folder or beside it; None if there is none, or if its digests
        are of another kind.
    """
    newest: tuple[int, Path] | None = None
    for folder in [target, *(target.parent.iterdir() if target.parent.is_dir() else ())]:
        # Hidden ones are being written or deleted.
        if folder != target and folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # not a checkpoint, or not to be read
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
    """Whether a linked file is what its manifest says, and was since it was linked."""
    folder = path.parents[len(Path(name).parts) - 1]
    try:
        found_digests = tuple(chunk.result() for chunk in digests)
        # After the digests, as a chunk may have changed once it was read. Somebody may have put a link here.
        status = plain_file(folder, name).stat()
        return (status.st_size, status.st_mtime_ns, found_digests) == (entry.size, changed_ns, entry.chunks)
    except (OSError, CheckpointError):  # the disk does not give it back
        return False


def _writes_same_bytes(
    write: Callable[[IO[bytes]], object], entry: FileEntry, on_same_chunk: Callable[[int], object]
) -> bool:
    """Whether a function writes what a manifest says about a file; it is stopped where it does not.

    Args:
        write: The function.
        entry: What the manifest says.
        on_same_chunk: Called with the start of each chunk that is the same.
    """
    compared = _ByteComparison(entry, on_same_chunk)
    try:
        write(cast("IO[bytes]", compared))
    except Exception:
        # torch.save raises errors of its own when a file takes no more.
        if not compared.differs:
            raise
    return compared.is_same()


class _ByteComparison(io.RawIOBase):
    """Takes the bytes of a file, and compares their digests with those of an entry."""

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
    """Takes as many bytes as a chunk has."""

    is_full = False

    def write(self, data: Any, /) -> int:
        self.is_full = self.is_full or self.tell() + memoryview(data).nbytes > CHUNK_BYTES
        if self.is_full:
            raise _DifferentBytesError
        return super().write(data)


class _DifferentBytesError(Exception):
    """Raised when the bytes written differ from those of the earlier file, or are more."""
