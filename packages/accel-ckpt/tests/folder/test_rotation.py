from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from accel_ckpt.file_names import MANIFEST
from accel_ckpt.folder import manifest, rotation
from accel_ckpt.folder.staging import staged


def save(folder: Path, *iterations: int) -> None:
    for iteration in iterations:
        with staged(folder / f"checkpoint_{iteration}") as staging:
            (staging.path / "model.safetensors").write_text(str(iteration))


def save_as_before(folder: Path, *iterations: int) -> None:
    """Save as earlier versions did: no sequence in the manifest."""
    save(folder, *iterations)
    for iteration in iterations:
        described = manifest.read(folder / f"checkpoint_{iteration}")
        assert described is not None
        facts = {key: value for key, value in described.facts.items() if key != "sequence"}
        manifest.write(folder / f"checkpoint_{iteration}", replace(described, facts=facts))


def names(folder: Path) -> list[str]:
    return [path.name for path in rotation.checkpoints(folder)]


def test_their_order_is_that_of_the_commits(tmp_path: Path) -> None:
    save(tmp_path, 10, 2, 1, 3)
    assert names(tmp_path) == ["checkpoint_10", "checkpoint_2", "checkpoint_1", "checkpoint_3"]
    save(tmp_path, 2)
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_2"
    assert [path.name for path in rotation.prune(tmp_path, 2)] == ["checkpoint_10", "checkpoint_1"]
    save(tmp_path, 0)
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_2", "checkpoint_0"]


def test_those_of_earlier_versions_are_in_the_order_of_their_numbers_before_later_commits(
    tmp_path: Path,
) -> None:
    save_as_before(tmp_path, 9, 10, 2)
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_9", "checkpoint_10"]
    save(tmp_path, 5, 11)
    (tmp_path / "checkpoint_12").mkdir()
    (tmp_path / "checkpoint_12" / "pytorch_model.bin").touch()  # another implementation continues
    assert names(tmp_path)[2:] == ["checkpoint_10", "checkpoint_5", "checkpoint_11", "checkpoint_12"]
    (tmp_path / "checkpoint_9" / MANIFEST).write_text("rubbish")
    assert names(tmp_path)[:2] == ["checkpoint_2", "checkpoint_9"]
    save(tmp_path, 0)
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_0"


def test_the_next_number_is_above_whatever_is_there(tmp_path: Path) -> None:
    assert rotation.next_number(tmp_path / "missing") == 0
    save(tmp_path, 3)
    (tmp_path / "checkpoint_7").mkdir()
    assert rotation.next_number(tmp_path) == 8
    (tmp_path / "checkpoint_9").touch()
    assert rotation.next_number(tmp_path) == 10
    assert rotation.next_sequence(tmp_path) == 10


def test_what_was_just_committed_stays_although_another_run_has_committed_since(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, 2)
    assert [path.name for path in rotation.prune(tmp_path, 1, tmp_path / "checkpoint_1")] == ["checkpoint_0"]
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]


def test_what_cannot_be_deleted_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0, 1)
    for name in ("rename", "unlink"):

        def refuse(*args: object) -> None:
            raise PermissionError(13, "refused")

        monkeypatch.setattr(os, name, refuse)
        with pytest.warns(UserWarning, match=r"cannot be deleted.*yourself"):
            rotation.prune(tmp_path, 1)
        monkeypatch.undo()
    assert rotation.latest(tmp_path) == tmp_path / "checkpoint_1"


def test_only_complete_ones_count(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 10)
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


def test_a_limit_below_one_is_rejected(tmp_path: Path) -> None:
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
