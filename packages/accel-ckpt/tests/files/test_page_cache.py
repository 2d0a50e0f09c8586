from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from pathlib import Path

import pytest

from accel_ckpt.files import page_cache
from accel_ckpt.files.page_cache import cached_part

DATA = random.Random(0).randbytes(100_000)

linux = pytest.mark.skipif(sys.platform != "linux", reason="what is in the cache is asked of Linux alone")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path


@linux
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 100_000), (5, 30_000), (4096, 4096), (99_999, 1)])
def test_what_was_just_written_is_there(file: Path, start: int, length: int) -> None:
    with cached_part(file, start, length) as part:
        assert part == DATA[start : start + length]


@linux
def test_no_class_of_ctypes_waits_for_the_garbage_collector(file: Path) -> None:
    before = ctypes.Array.__subclasses__()
    gc.disable()
    try:
        for pages in range(1, 20):
            with cached_part(file, 0, 4096 * pages) as part:
                assert part is not None
        assert ctypes.Array.__subclasses__() == before
    finally:
        gc.enable()


@linux
def test_what_was_never_read_is_not(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(8192))
        file.truncate(2**20)
    with cached_part(tmp_path / "file", 0, 8192) as part:
        assert part == bytes(8192)
    with cached_part(tmp_path / "file", 0, 2**20) as part:
        assert part is None


@linux
def test_who_cuts_the_file_off_meanwhile_has_to_wait(file: Path) -> None:
    thread = threading.Thread(target=os.truncate, args=(file, 5000))
    with cached_part(file, 0, len(DATA)) as part:
        thread.start()
        thread.join(0.3)
        assert file.stat().st_size == len(DATA)  # else reading the part would kill this process
        assert part == DATA
    thread.join(60)

    assert file.stat().st_size == 5000
    with cached_part(file, 0, len(DATA)) as part:
        assert part is None


@linux
def test_the_file_may_be_opened_for_writing_afterwards(file: Path) -> None:
    with cached_part(file, 0, 9):
        with pytest.raises(BlockingIOError):
            os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        copied = os.open(file, os.O_RDONLY)  # reading is for all
        os.close(copied)

    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


@linux
def test_a_file_that_somebody_has_open_for_writing_is_not_used(file: Path) -> None:
    with open(file, "r+b"), cached_part(file, 0, 100) as part:
        assert part is None
    with cached_part(file, 0, 100) as part:
        assert part == DATA[:100]


def test_a_part_beyond_the_end_is_not_there(file: Path) -> None:
    with cached_part(file, 99_000, 2000) as part:
        assert part is None


def test_who_may_not_write_is_told_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache.os, "access", lambda path, mode: mode != os.W_OK)
    with cached_part(file, 0, 100) as part:
        assert part is None


def test_a_file_system_that_maps_nothing_will_do(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(page_cache.mmap, "mmap", refuse)
    with cached_part(file, 0, 9) as part:
        assert part is None


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), cached_part(tmp_path / "none", 0, 9):
        pass
