from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.files import piece_file
from accel_ckpt.files.page_cache import cached_part
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


def test_a_large_file_is_written_past_the_cache(make: Callable[..., PieceFile], tmp_path: Path) -> None:
    if not piece_file._is_on_disk(tmp_path):
        pytest.skip("needs a disk of this machine for temporary files")
    size = 3 * piece_file.PIECE_BYTES
    for cached in (True, False):
        file = make(cached)
        file.write(os.urandom(size + 1))
        file.finish()
        with cached_part(tmp_path / "x", 0, size) as part:
            assert (part is not None) == cached


def test_a_folder_on_a_network_or_in_memory_is_written_through_the_cache() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("needs a file system in memory")
    assert not piece_file._is_on_disk(shared)


def test_a_file_system_that_refuses_is_written_through_the_cache(
    make: Callable[..., PieceFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    file = make()
    file.write(b"x" * 10000)
    assert file.finish() == digests(b"x" * 10000)
    assert (tmp_path / "x").read_bytes() == b"x" * 10000


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


def test_the_end_of_a_full_disk_is_told(
    make: Callable[..., PieceFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file = make()
    file.write(b"x")  # waits for more
    with pytest.raises(OSError, match="No space left"):
        file.finish()
