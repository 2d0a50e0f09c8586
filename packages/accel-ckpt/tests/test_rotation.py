from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_ckpt import rotation
from accel_ckpt.staging import staged


def save(folder: Path, *iterations: int) -> None:
    for iteration in iterations:
        with staged(folder / f"checkpoint_{iteration}") as staging:
            (staging.path / "model.safetensors").write_text(str(iteration))


def test_they_are_sorted_by_number_and_only_complete_ones_count(tmp_path: Path) -> None:
    save(tmp_path, 10, 2, 1)
    (tmp_path / "checkpoint_11").mkdir()
    (tmp_path / "checkpoint_12").mkdir()
    (tmp_path / "checkpoint_12" / "notes.txt").touch()
    (tmp_path / "checkpoint_13").touch()
    (tmp_path / "best").mkdir()
    assert [path.name for path in rotation.checkpoints(tmp_path)] == [
        "checkpoint_1",
        "checkpoint_2",
        "checkpoint_10",
    ]
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_10"

    # As another implementation leaves it
    (tmp_path / "checkpoint_12" / "pytorch_model.bin").touch()
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_12"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert rotation.latest(tmp_path) is None
    assert rotation.checkpoints(tmp_path / "missing") == []
    assert rotation.prune(tmp_path / "missing", 1) == []


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])]
)
def test_the_oldest_go(tmp_path: Path, limit: int | None, kept: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "best").mkdir()
    gone = rotation.prune(tmp_path, limit)

    assert sorted(os.listdir(tmp_path)) == sorted(["best", *(f"checkpoint_{i}" for i in kept)])
    assert [path.name for path in gone] == [f"checkpoint_{i}" for i in range(1, 5) if i not in kept]


def test_an_incomplete_one_does_not_push_out_a_complete_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoint_2").mkdir()
    assert rotation.prune(tmp_path, 1) == []
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_1"


def test_what_interrupted_saves_left_goes_too(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for name in (".checkpoint_0.staging-{}-{}-00000000", ".checkpoint_0.replaced-{}-{}-00000000"):
        (tmp_path / name.format(os.uname().nodename, os.getpid())).mkdir()
    rotation.prune(tmp_path, 1)
    assert os.listdir(tmp_path) == ["checkpoint_2"]


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"total_limit must be at least 1.*not 0"):
        rotation.prune(tmp_path, 0)
    assert rotation.latest(tmp_path) is not None


def test_the_newest_complete_one_never_goes(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoint_7").mkdir()
    (tmp_path / "checkpoint_7" / "model.safetensors").write_text("the half of another implementation's")
    rotation.prune(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_7"]
