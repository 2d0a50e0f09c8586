from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_ckpt.files.disk import replacing


def test_a_file_is_replaced_when_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(path.read_text()))
    with replacing(path) as draft:
        draft.write_text("new")

    assert flushed == ["old"]  # the old one was there while the new one was flushed
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
