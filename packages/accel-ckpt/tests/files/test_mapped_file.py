from __future__ import annotations

import ctypes
import gc
import inspect
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ckpt.files import mapped_file
from accel_ckpt.files.mapped_file import MappedFile

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
    with MappedFile(file).view(start, length) as view:
        assert view == DATA[start : start + length]


@linux
def test_no_class_of_ctypes_waits_for_the_garbage_collector(file: Path) -> None:
    mapped = MappedFile(file)
    before = ctypes.Array.__subclasses__()
    gc.disable()
    try:
        for pages in range(1, 20):
            with mapped.view(0, 4096 * pages) as view:
                assert view is not None
        assert ctypes.Array.__subclasses__() == before
    finally:
        gc.enable()


@linux
def test_what_was_never_read_is_not(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(8192))
        file.truncate(2**21)
    mapped = MappedFile(tmp_path / "file")
    with mapped.view(0, 8192) as view:
        assert view == bytes(8192)
    with mapped.view(0, 2**21) as view:  # of which a few pages are requested
        assert view is None


@linux
def test_what_cannot_be_brought_in_is_not_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Calls:
        mincore = staticmethod(mapped_file._calls().mincore)

        @staticmethod
        def madvise(*args: Any) -> int:
            return -1  # an older Linux, or a page that the disk does not give back

    monkeypatch.setattr(mapped_file, "_calls", Calls)
    with MappedFile(file).view(0, 100) as view:
        assert view is None


@linux
def test_who_cuts_the_file_off_meanwhile_has_to_wait(file: Path) -> None:
    thread = threading.Thread(target=os.truncate, args=(file, 5000))
    mapped = MappedFile(file)
    with mapped.view(0, len(DATA)) as view:
        thread.start()
        thread.join(0.3)
        assert file.stat().st_size == len(DATA)  # else reading the part would kill this process
        assert view == DATA
    thread.join(60)

    assert file.stat().st_size == 5000
    with mapped.view(0, len(DATA)) as view:
        assert view is None
    with mapped.view(4000, 1000) as view:  # it may hold other bytes
        assert view is None
    with pytest.raises(RuntimeError, match="has changed since it was mapped"):
        mapped.load("cpu")


@linux
def test_the_file_may_be_opened_for_writing_afterwards(file: Path) -> None:
    with MappedFile(file).view(0, 9):
        with pytest.raises(BlockingIOError):
            os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        copied = os.open(file, os.O_RDONLY)  # reading is for all
        os.close(copied)

    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


@linux
def test_a_file_that_somebody_has_open_for_writing_is_not_used(file: Path) -> None:
    mapped = MappedFile(file)
    with open(file, "r+b"), mapped.view(0, 100) as view:
        assert view is None
    with mapped.view(0, 100) as view:
        assert view == DATA[:100]


@linux  # elsewhere files that are mapped may not be changed
def test_a_part_beyond_the_end_is_not_there(file: Path) -> None:
    mapped = MappedFile(file)
    with mapped.view(99_000, 2000) as view:
        assert view is None
    with open(file, "ab") as grown:
        grown.write(bytes(2000))
    with mapped.view(99_000, 2000) as view:  # of what was mapped
        assert view is None


@linux
def test_a_file_that_is_gone_is_an_error(tmp_path: Path, file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none")
    mapped = MappedFile(file)
    file.unlink()
    with pytest.raises(FileNotFoundError), mapped.view(0, 9):
        pass


@linux
def test_another_file_in_its_place_is_not_taken_for_it(tmp_path: Path, file: Path) -> None:
    mapped = MappedFile(file)
    torch.save(objects(), tmp_path / "other")
    (tmp_path / "other").replace(file)
    with mapped.view(0, 9) as view:
        assert view is None
    with pytest.raises(RuntimeError, match="has changed since it was mapped"):
        mapped.load("cpu")


def objects() -> dict[str, Any]:
    whole = torch.arange(6.0)
    return {"whole": whole, "part": whole[2:4], "half": torch.ones(3, dtype=torch.bfloat16), "number": 3}


@pytest.mark.core  # it stands on what is private in torch
def test_what_is_loaded_is_what_torch_loads(tmp_path: Path) -> None:
    torch.save(objects(), tmp_path / "x.bin")
    found = MappedFile(tmp_path / "x.bin").load(torch.device("cpu"))
    expected = torch.load(tmp_path / "x.bin", mmap=True)
    gc.collect()  # the mapping lives as long as its tensors

    assert found.keys() == expected.keys()
    assert found["number"] == 3
    for name in ("whole", "part", "half"):
        assert torch.equal(found[name], expected[name])
        assert found[name].dtype == expected[name].dtype
    found["whole"][2] = 9
    assert found["part"].tolist() == [9.0, 3.0]  # views share memory as before
    assert torch.equal(torch.load(tmp_path / "x.bin")["whole"], torch.arange(6.0))  # the file is as it was


@linux
def test_what_a_digest_has_read_is_where_it_is_loaded_from(tmp_path: Path) -> None:
    torch.save(torch.arange(1000), tmp_path / "x.bin")
    mapped = MappedFile(tmp_path / "x.bin")
    tensor = mapped.load("cpu")
    with mapped.view(0, (tmp_path / "x.bin").stat().st_size) as view:
        assert view is not None
        assert bytes(view).count(tensor.numpy().tobytes()) == 1
        tensor.fill_(7)  # in the memory that the digest has read, and in no file
        assert bytes(view).count(tensor.numpy().tobytes()) == 1
    assert torch.equal(torch.load(tmp_path / "x.bin"), torch.arange(1000))


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "x.bin")
    with torch.device("meta"):
        mapped = MappedFile(tmp_path / "x.bin")
    assert mapped.load("cpu").tolist() == [1.0] * 3


@pytest.mark.core
def test_other_objects_are_not_made(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "x.bin")
    with pytest.raises(Exception, match=r"(?i)unsupported"):
        MappedFile(tmp_path / "x.bin").load("cpu")


@pytest.mark.core
def test_torch_still_has_what_loading_stands_on() -> None:
    # Without it files are loaded by torch.load, which takes longer after a check.
    parameters = inspect.signature(torch.serialization._load).parameters
    assert list(parameters)[:3] == ["zip_file", "map_location", "pickle_module"]
    assert "overall_storage" in parameters
