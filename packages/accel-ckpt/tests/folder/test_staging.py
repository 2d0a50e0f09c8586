from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import piece_file
from accel_ckpt.files.mapped_file import MappedFile
from accel_ckpt.folder import manifest
from accel_ckpt.folder.staging import find_open_staging, staged
from accel_state.process.info import ProcessInfo
from accel_state.process.state import current_process


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "c"
    with staged(target) as staging:
        (staging.path / "model.safetensors").write_text("x")
        staging.facts["step"] = 5
        assert not target.exists()
        assert os.fspath(staging) == str(staging.path)
        assert staging.commits
        assert staging.writes_shared
    read = manifest.read(target)

    assert read is not None
    assert read.facts["step"] == 5
    assert read.facts["world_size"] == 1
    assert os.listdir(tmp_path / "deep") == ["c"]


def test_an_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "c"
    with staged(target) as staging:
        (staging.path / "x").write_text("one")

    def fail() -> None:
        with staged(target) as staging:
            (staging.path / "x").write_text("two")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert (target / "x").read_text() == "one"
    assert os.listdir(tmp_path) == ["c"]


def test_facts_that_are_no_json_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"), staged(tmp_path / "c") as staging:
        staging.facts["model"] = object()
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "c"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_an_open_folder_is_entered_again(tmp_path: Path) -> None:
    target = tmp_path / "c"
    with staged(target) as outer:
        with staged(outer.path) as inner:
            assert inner is outer
            assert find_open_staging(str(outer.path)) is outer
        assert not target.exists()
    assert target.exists()
    assert find_open_staging(outer.path) is None


def test_a_linked_folder_is_replaced_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "c").symlink_to("disk")
    with staged(tmp_path / "c") as staging:
        (staging.path / "x").write_text("one")

    assert (tmp_path / "c").is_symlink()
    assert (tmp_path / "disk" / "x").read_text() == "one"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), staged(tmp_path / "file" / "c"):
        pytest.fail("entered")


# Several processes


def _write(folder: str, fail_on: int | None = None, process: ProcessInfo | None = None) -> dict[str, Any]:
    process = current_process() if process is None else process
    try:
        with staged(folder, process=process) as staging:
            if staging.writes_shared:
                (staging.path / "shared").write_text("s")
            (staging.path / f"own_{process.rank}").write_text(str(process.rank))
            if process.rank == fail_on:
                raise OSError(28, "disk full")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "left": os.listdir(Path(folder).parent)}
    return {"owner": staging.commits, "files": files(Path(folder))}


def test_all_processes_write_one_folder(world: Any, tmp_path: Path) -> None:
    results = world.run(_write, str(tmp_path / "c"), size=3)

    assert [result["owner"] for result in results] == [True, False, False]
    expected = [manifest.MANIFEST, "own_0", "own_1", "own_2", "shared"]
    assert all(result["files"] == expected for result in results)
    read = manifest.read(tmp_path / "c")
    assert read is not None
    assert read.facts["world_size"] == 3
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_fails_all_fail_and_nothing_changes(world: Any, tmp_path: Path, failing: int) -> None:
    world.run(_write, str(tmp_path / "c"))
    before = files(tmp_path)
    results = world.run(_write, str(tmp_path / "c"), failing)

    assert results[failing]["error"] == "OSError: [Errno 28] disk full"
    assert results[1 - failing]["error"] == (
        f"CheckpointError: writing the checkpoint failed on another process. process {failing}: "
        "OSError: [Errno 28] disk full"
    )
    assert files(tmp_path) == before


def _write_blocked(folder: str) -> str:
    try:
        with staged(Path(folder) / "c"):
            return "entered"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_folder_that_the_main_process_cannot_make_is_an_error_on_all(world: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    results = world.run(_write_blocked, str(tmp_path / "file"))

    assert results[0].startswith(("FileExistsError", "NotADirectoryError"))
    assert results[1].startswith("CheckpointError: opening the checkpoint folder failed on the main process")


def _on_own_disk(base: str, each_node: bool) -> dict[str, Any]:
    """Each process as if on its own machine: it sees its own disk alone, and is local main there."""
    here = current_process()
    process = replace(here, local_rank=0, local_world_size=1)
    folder = Path(base) / f"disk{here.rank}" / "c"
    with staged(folder, save_on_each_node=each_node, process=process) as staging:
        if staging.writes_shared:
            (staging.path / "shared").write_text("s")
        (staging.path / f"own_{here.rank}").write_text("x")
    return {"owner": staging.commits, "files": files(folder), "beside": os.listdir(folder.parent)}


@pytest.mark.parametrize("each_node", [False, True])
def test_machines_with_disks_of_their_own(world: Any, tmp_path: Path, each_node: bool) -> None:
    first, second = world.run(_on_own_disk, str(tmp_path), each_node)

    assert first == {"owner": True, "files": [manifest.MANIFEST, "own_0", "shared"], "beside": ["c"]}
    shared = ["shared"] if each_node else []
    assert second == {"owner": True, "files": [manifest.MANIFEST, "own_1", *shared], "beside": ["c"]}
    facts = [manifest.read(tmp_path / f"disk{rank}" / "c").facts for rank in range(2)]  # type: ignore[union-attr]
    assert facts[0]["save"] == facts[1]["save"]


def _each_node_on_one_disk(folder: str) -> bool:
    process = replace(current_process(), local_rank=0, local_world_size=1)
    with staged(folder, save_on_each_node=True, process=process) as staging:
        (staging.path / f"own_{process.rank}").write_text("x")
    return staging.writes_shared


def test_machines_that_share_a_disk_do_not_race(world: Any, tmp_path: Path) -> None:
    assert world.run(_each_node_on_one_disk, str(tmp_path / "c")) == [True, False]
    assert files(tmp_path / "c") == [manifest.MANIFEST, "own_0", "own_1"]


def test_checkpoint_error_is_what_others_get() -> None:
    assert issubclass(CheckpointError, RuntimeError)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's cache is looked at on Linux alone")
@pytest.mark.parametrize("incremental", [True, False])
def test_the_cache_keeps_what_the_next_save_reads(tmp_path: Path, incremental: bool) -> None:
    if not piece_file._is_on_disk(tmp_path):
        pytest.skip("needs a disk of this machine for temporary files")
    size = 2 * piece_file.PIECE_BYTES
    with staged(tmp_path / "c", incremental=incremental) as staging:
        staging.write({"x": torch.arange(size, dtype=torch.uint8)}, "x.safetensors", True)
    with MappedFile(tmp_path / "c" / "x.safetensors").view(0, size) as view:
        assert (view is not None) == incremental


class Counted:
    """Counts how often it is pickled."""

    times = 0

    def __init__(self, size: int) -> None:
        self.content = os.urandom(size)

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.times += 1
        return bytes, (self.content,)


@pytest.mark.parametrize(("before", "now", "times"), [(9, 9, 1), (9, 2**25, 2), (2**25, 9, 2)])
def test_a_small_file_that_changed_is_made_once(tmp_path: Path, before: int, now: int, times: int) -> None:
    for size in (before, now):
        Counted.times = 0
        with staged(tmp_path / "c", incremental=True) as staging:
            staging.write(Counted(size), "x")
    assert Counted.times == times
    assert (tmp_path / "c" / "x").stat().st_size > now
