from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.files import piece_file
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.files.piece_file import PieceFile
from accel_ckpt.files.threads import Threads

CHUNK = 2**16


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., PieceFile]]:
    files: list[PieceFile] = []
    with Threads(1, "writes") as thread:

        def make(cached: bool = False) -> PieceFile:
            files.append(PieceFile(tmp_path / "x", thread, CHUNK, cached, lambda size: None))
            return files[-1]

        yield make
        for file in files:
            file.close()


def digests(content: bytes) -> tuple[str, ...]:
    return tuple(
        xxhash.xxh3_128_hexdigest(content[start : start + CHUNK]) for start in range(0, len(content), CHUNK)
    )


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1)), max_size=6),
    cached=st.booleans(),
)
def test_the_file_has_the_bytes_and_the_digests_of_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]], cached: bool
) -> None:
    """Data that ends with a block of the disk, a byte before or behind it; more pieces than may wait."""
    given = [os.urandom(max(0, blocks * 8192 + more)) for blocks, more in pieces]
    path, sizes = tmp_path_factory.mktemp("p") / "x", []
    with Threads(1, "writes") as thread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_file, "PIECE_BYTES", 4096)
        file = PieceFile(path, thread, CHUNK, cached, sizes.append)
        assert [file.write(data) for data in given] == [len(data) for data in given]
        found = file.finish()
        file.close()
    whole = b"".join(given)
    assert path.read_bytes() == whole
    assert found == digests(whole)
    assert sum(sizes) == len(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's cache is looked at on Linux alone")
def test_a_large_file_is_written_past_the_cache(make: Callable[..., PieceFile], tmp_path: Path) -> None:
    if not piece_file._is_on_disk(tmp_path):
        pytest.skip("needs a disk of this machine for temporary files")
    size = 3 * piece_file.PIECE_BYTES
    for cached in (True, False):
        file = make(cached)
        file.write(os.urandom(size + 1))
        file.finish()
        with MappedFile(tmp_path / "x").view(0, size) as view:
            assert (view is not None) == cached


@pytest.mark.skipif(sys.platform != "linux", reason="disks are looked for in /sys")
def test_a_folder_on_a_network_or_in_memory_is_written_through_the_cache() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("needs a file system in memory")
    assert not piece_file._is_on_disk(shared)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_rejects_is_written_through_the_cache(
    make: Callable[..., PieceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(number, os.strerror(number))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    file = make()
    file.write(b"x" * 10000)
    assert file.finish() == digests(b"x" * 10000)
    assert (tmp_path / "x").read_bytes() == b"x" * 10000


def test_a_system_that_takes_less_at_once_is_given_the_rest(
    make: Callable[..., PieceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: plain(handle, data[:1000]))
    content = os.urandom(5000)
    file = make()
    file.write(content)
    assert file.finish() == digests(content)
    assert (tmp_path / "x").read_bytes() == content


def test_a_file_that_cannot_be_opened_leaves_nothing_to_close(tmp_path: Path) -> None:
    with Threads(1, "writes") as thread, pytest.raises(FileNotFoundError):
        PieceFile(tmp_path / "none" / "x", thread, CHUNK, True, lambda size: None)
    gc.collect()  # pytest's hook for errors that are ignored would see one of __del__


def test_what_counts_the_pieces_may_fail(make: Callable[..., PieceFile]) -> None:
    file = make()
    file._on_written = lambda size: 1 / 0
    file.write(b"x")
    with pytest.raises(ZeroDivisionError):
        file.finish()
    assert isinstance(file.error, ZeroDivisionError)


def test_what_is_given_may_change_afterwards(make: Callable[..., PieceFile], tmp_path: Path) -> None:
    data = bytearray(b"a" * 2**20)
    file = make()
    file.write(data)
    data[:] = b"b" * 2**20
    file.finish()
    assert (tmp_path / "x").read_bytes() == b"a" * 2**20


def test_a_full_disk_ends_the_writing_soon_and_nothing_follows(
    make: Callable[..., PieceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_file, "PIECE_BYTES", 4096)
    plain, count = os.write, 0

    def fill(handle: int, data: Any) -> int:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(handle, data)

    monkeypatch.setattr(os, "write", fill)
    file = make()
    with pytest.raises(OSError, match="No space left"):
        file.write(b"x" * 4096 * 50)
    with pytest.raises(OSError, match="No space left"):
        file.finish()
    file.close()
    assert (tmp_path / "x").stat().st_size == 2 * 4096
    assert count == 3


def test_the_end_of_a_full_disk_is_reported(
    make: Callable[..., PieceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file = make()
    file.write(b"x")  # waits for more
    with pytest.raises(OSError, match="No space left"):
        file.finish()
