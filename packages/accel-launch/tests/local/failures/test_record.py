from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_launch.local.failures.record import Raised, read_record, record_folder


def test_a_record_has_a_time_and_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_record(path) is None

    path.write_text('{"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback"}}}')
    os.utime(path, (5.25, 5.25))
    assert read_record(path) == Raised(5.25, "Traceback")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "x"}'])
def test_half_a_record_has_a_time(tmp_path: Path, text: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    os.utime(path, (5.25, 5.25))

    assert read_record(path) == Raised(5.25, "")


def test_the_folder_goes_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with record_folder() as folder:
        assert folder is not None
        (folder / "0.json").touch()

    assert list(tmp_path.iterdir()) == []


def test_no_room_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with record_folder() as folder:
        assert folder is None
