from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.files import piece_file, writer
from accel_ckpt.files.digests import FileEntry
from accel_ckpt.files.writer import Writer


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.binary(max_size=200), max_size=12), chunk=st.integers(1, 300))
def test_the_digests_are_those_of_the_finished_file(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("c")
    with closing(Writer(chunk_bytes=chunk)) as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_file, "PIECE_BYTES", 64)
        with files.open(folder / "model.safetensors") as file:
            for piece in pieces:
                file.write(piece)
        (folder / "extra").write_bytes(b"".join(pieces))
        files.add_existing(folder / "extra")
        entries = files.entries(folder)
    whole = b"".join(pieces)
    assert (folder / "model.safetensors").read_bytes() == whole
    chunks = tuple(
        xxhash.xxh3_128_hexdigest(whole[start : start + chunk]) for start in range(0, len(whole), chunk)
    )
    assert entries == [
        FileEntry("model.safetensors", len(whole), "model", chunks),
        FileEntry("extra", len(whole), "other", chunks),
    ]


def test_a_piece_is_on_its_way_before_the_file_is_finished(tmp_path: Path) -> None:
    with closing(Writer()) as files, files.open(tmp_path / "x") as file:
        done = threading.Event()
        files._progress.add = lambda count: done.set()  # type: ignore[method-assign]
        file.write(bytes(piece_file.PIECE_BYTES))
        assert done.wait(20)


def test_a_file_that_was_changed_afterwards_has_no_entry(tmp_path: Path) -> None:
    with closing(Writer()) as files:
        with files.open(tmp_path / "x") as file:
            file.write(b"one")
        with files.open(tmp_path / "y") as file:
            file.write(b"one")
        # Not in place: a digest may still map the file, and one cut off under it ends the process.
        (tmp_path / "other").write_bytes(b"other")
        os.replace(tmp_path / "other", tmp_path / "x")
        assert [entry.path for entry in files.entries(tmp_path)] == ["y"]
        os.unlink(tmp_path / "y")
        assert files.entries(tmp_path) == []


def test_a_full_disk_is_reported_as_such_although_torch_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with closing(Writer()) as files:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"), files.open(tmp_path / "x") as file:
            torch.save({"x": torch.ones(2**20)}, file)


def test_what_is_read_back_is_what_the_disk_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(writer, "flush", refuse)
    with closing(Writer()) as files:
        with files.open(tmp_path / "x") as file:
            file.write(b"one")
        with pytest.raises(OSError, match="Input/output error"):
            files.entries(tmp_path)
