"""Digests of files, and the check of a folder's files against them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TypeVar

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.files.hashing import ALGORITHM, digest_chunk
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.files.progress import Progress
from accel_ckpt.files.safetensors_header import shortened, tensors_between
from accel_ckpt.files.threads import Threads

_T = TypeVar("_T")

# Large enough to keep threads busy, small enough that a large file is split among them.
CHUNK_BYTES = 16 * 2**20

THREADS = 4
"""How many chunks are digested at once: a disk reads faster with several requests."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        path: Its path inside the folder, with forward slashes.
        size: Its size, in bytes.
        role: Its role; see `file_names.role_of`.
        chunks: Digest of each chunk, in hexadecimal; empty for an empty file.
    """

    path: str
    size: int
    role: str
    chunks: tuple[str, ...]


def verify(
    folder: Path,
    entries: Iterable[FileEntry],
    chunk_bytes: int = CHUNK_BYTES,
    contents: bool = True,
    progress: Progress | None = None,
    algorithm: str = ALGORITHM,
    find_mapped: Callable[[str], MappedFile | None] = lambda name: None,
) -> None:
    """Check files against the manifest.

    Args:
        folder: The checkpoint folder.
        entries: The files to check.
        chunk_bytes: Size of a digested chunk.
        contents: Whether to check their bytes, or only that they are plain files of the right size.
        progress: Counts the checked bytes.
        algorithm: The algorithm of the entries' digests, one of `hashing.ALGORITHMS`.
        find_mapped: Returns the mapped file of an entry's path, if there is one, to digest it there.

    Raises:
        CorruptCheckpointError: If files are missing, unreadable, changed, or not plain files in the folder;
            it names all of them.
    """

    def digest(path: Path, start: int) -> str | OSError:
        try:
            return digest_chunk(path, start, chunk_bytes, algorithm, mapped[path])
        except OSError as error:  # the disk cannot read it
            return error
        finally:
            if progress is not None:
                progress.add(chunk_bytes)

    problems = {entry: _unreadable(folder, entry) for entry in entries}
    # Sizes first, which cost nothing: missing files are reported at once.
    readable = [entry for entry, problem in problems.items() if problem is None and contents]
    mapped = {folder / entry.path: find_mapped(entry.path) for entry in readable}
    digested = _chunk_by_chunk([folder / entry.path for entry in readable], chunk_bytes, digest)
    # Replaces the None of each readable file by the result of its digests.
    problems |= {
        entry: _difference(folder, entry, chunks, chunk_bytes)
        for entry, chunks in zip(readable, digested, strict=True)
    }
    found = [problem for problem in problems.values() if problem is not None]
    if found:
        raise CorruptCheckpointError(
            f"{folder} is damaged: {'; '.join(found)}. Load another checkpoint, or copy this one again."
        )


def plain_file(folder: Path, name: str) -> Path:
    """Find a file inside a folder without following links.

    Args:
        folder: The folder.
        name: Path of the file inside the folder.

    Returns:
        The file's path.

    Raises:
        FileNotFoundError: If it does not exist.
        CorruptCheckpointError: If it, or a folder in its path, is a link or a special file.
    """
    path = folder
    for item in PurePosixPath(name).parts:
        path = path / item
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and path != folder / name):
            raise CorruptCheckpointError(f"{name} is {kind_of(mode)} where a file is expected")
    return path


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Check that a path is a regular file or a link to one; reading a pipe could block forever.

    Args:
        path: The path.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If it does not exist.
        CorruptCheckpointError: If it is something else.
    """
    regular_size(path)
    return Path(path)


def regular_size(path: str | os.PathLike[str]) -> int:
    """Return the size of a regular file in bytes; checked like `regular_file`.

    Args:
        path: The path.

    Raises:
        FileNotFoundError: If it does not exist.
        CorruptCheckpointError: If it is something else.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path} is {kind_of(status.st_mode)} where a file is expected")
    return status.st_size


def kind_of(mode: int) -> str:
    """Return the kind of file of a mode, for messages."""
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def _chunk_by_chunk(
    paths: Sequence[Path], chunk_bytes: int, function: Callable[[Path, int], _T]
) -> list[tuple[_T, ...]]:
    """Call a function with the start of each chunk of each file, in threads."""
    # Submitted for all files before the first result is awaited, so that small files overlap too.
    with Threads(THREADS, "accel-digest") as pool:  # digesting releases the GIL
        pending = [
            [pool.submit(function, path, start) for start in range(0, path.stat().st_size, chunk_bytes)]
            for path in paths
        ]
        return [tuple(chunk.result() for chunk in chunks) for chunks in pending]


def _unreadable(folder: Path, entry: FileEntry) -> str | None:
    try:
        size = plain_file(folder, entry.path).stat().st_size
    except FileNotFoundError:
        return f"{entry.path} is missing"
    except CorruptCheckpointError as error:
        return str(error)
    return None if size == entry.size else f"{entry.path} has {size} bytes and should have {entry.size}"


def _difference(
    folder: Path, entry: FileEntry, chunks: Sequence[str | OSError], chunk_bytes: int
) -> str | None:
    # zip_longest: a file may have gained or lost a full chunk since its size was compared.
    for index, (actual, expected) in enumerate(zip_longest(chunks, entry.chunks)):
        if actual != expected:
            first = index * chunk_bytes
            last = min(first + chunk_bytes, entry.size) - 1
            if isinstance(actual, OSError):
                return f"{entry.path} cannot be read in bytes {first} to {last}: {actual.strerror}"
            where = _contents(folder / entry.path, first, last)
            return f"{entry.path} differs in bytes {first} to {last}{where}"
    return None


def _contents(path: Path, first: int, last: int) -> str:
    """Return the names of the weights in a byte range of a safetensors file, if its header is readable."""
    try:
        names = tensors_between(path, first, last)
    # The header itself may be damaged; the message is then shorter.
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return ""
    return f", in {shortened(names)}" if names else ""
