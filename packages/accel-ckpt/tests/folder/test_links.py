"""Incremental saves: what is linked, and that every checkpoint stays complete."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt import checkpoint
from accel_ckpt.background import thread
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files import tensors
from accel_ckpt.files.digests import FileEntry
from accel_ckpt.files.writer import Writer
from accel_ckpt.folder import links, manifest, rotation, staging
from accel_ckpt.folder.links import PreviousCheckpoint
from accel_ckpt.folder.staging import Staging, staged
from accel_state.process.state import current_process

FROZEN, TRAINED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OTHER = "custom_checkpoint_0.pkl"


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    thread.join()
    thread._current = None
    staging.release_buffer()


def write(opened: Staging, value: float) -> None:
    opened.write({"base": torch.arange(9000.0)}, FROZEN, safe_serialization=True)
    opened.write({"adapter": torch.full((3,), value)}, TRAINED, safe_serialization=True)
    opened.write({"table": torch.arange(5), "name": "constant"}, OTHER)
    opened.write({"moment": torch.full((3,), value)}, "optimizer.bin")
    opened.write_bytes(b"{}", "model.safetensors.index.json")


def save(folder: Path, value: float, incremental: bool = True, blocking: bool = True) -> None:
    with staged(folder, incremental=incremental, blocking=blocking) as opened:
        write(opened, value)
    thread.wait()


def linked(first: Path, second: Path) -> set[str]:
    described = manifest.read(second)
    assert described is not None
    return {
        name
        for name in described.paths()
        if (first / name).exists() and (first / name).samefile(second / name)
    }


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in manifest.files_in(folder)}


UNCHANGED = {FROZEN, OTHER, "model.safetensors.index.json"}


@pytest.mark.parametrize("blocking", [True, False])
def test_what_did_not_change_is_linked_and_outlives_the_earlier_checkpoint(
    tmp_path: Path, blocking: bool
) -> None:
    save(tmp_path / "plain" / "c", 2.0, incremental=False)
    save(tmp_path / "checkpoint_0", 1.0, blocking=blocking)
    save(tmp_path / "checkpoint_1", 2.0, blocking=blocking)
    assert linked(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1") == UNCHANGED
    assert content(tmp_path / "checkpoint_1") == content(tmp_path / "plain" / "c")

    assert rotation.prune(tmp_path, 1) == [tmp_path / "checkpoint_0"]
    checkpoint.verify(tmp_path / "checkpoint_1")
    assert tensors.load(tmp_path / "checkpoint_1" / FROZEN)["base"].tolist() == list(range(9000))
    save(tmp_path / "checkpoint_2", 3.0, blocking=blocking)
    assert linked(tmp_path / "checkpoint_1", tmp_path / "checkpoint_2") == UNCHANGED
    save(tmp_path / "checkpoint_3", 3.0, incremental=False)
    assert linked(tmp_path / "checkpoint_2", tmp_path / "checkpoint_3") == set()


def test_the_same_folder_again_and_a_folder_with_files_of_others(tmp_path: Path) -> None:
    save(tmp_path / "c", 1.0)
    inode = (tmp_path / "c" / FROZEN).stat().st_ino
    save(tmp_path / "c", 2.0)
    (tmp_path / "c" / "notes").write_text("theirs")
    save(tmp_path / "c", 3.0)  # in place: the link and its goal are one file
    save(tmp_path / "c", 4.0)

    assert (tmp_path / "c" / FROZEN).stat().st_ino == inode
    assert (tmp_path / "c" / FROZEN).stat().st_nlink == 1
    assert sorted(os.listdir(tmp_path / "c")) == sorted(
        [*UNCHANGED, TRAINED, "optimizer.bin", "notes", MANIFEST]
    )
    checkpoint.verify(tmp_path / "c")
    assert tensors.load(tmp_path / "c" / TRAINED)["adapter"].tolist() == [4.0] * 3


def test_the_newest_complete_one_counts(tmp_path: Path) -> None:
    assert links.find_previous(tmp_path / "none" / "c") is None
    for number, name in enumerate(["step_2", "step_9", "step_10", ".hidden"]):
        save(tmp_path / name, 1.0, incremental=False)
        os.utime(tmp_path / name / MANIFEST, (number, number))
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    found = links.find_previous(tmp_path / "step_11")
    assert found is not None
    assert found.folder == tmp_path / "step_10"
    described = manifest.read(tmp_path / "step_10")
    assert described is not None
    manifest.write(tmp_path / "step_10", replace(described, algorithm="sha256"))
    assert links.find_previous(tmp_path / "step_11") is None
    (tmp_path / "step_10" / MANIFEST).write_text("rubbish")
    assert links.find_previous(tmp_path / "step_11") is None
    save(tmp_path / "step_11", 1.0)
    checkpoint.verify(tmp_path / "step_11")


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=20), max_size=6),
    change=st.sampled_from(["nothing", "flip", "longer", "shorter", "disk", "disk shorter"]),
    at=st.integers(0, 100),
    chunk=st.integers(1, 30),
)
def test_a_file_is_linked_where_its_bytes_are_the_same_and_nowhere_else(
    pieces: list[bytes], change: str, at: int, chunk: int
) -> None:
    whole = bytearray(b"".join(pieces))
    chunks = tuple(
        xxhash.xxh3_128_hexdigest(whole[start : start + chunk]) for start in range(0, len(whole), chunk)
    )
    now, there = bytearray(whole), bytearray(whole)
    if change in ("flip", "disk") and whole:
        (now if change == "flip" else there)[at % len(whole)] ^= 1 << at % 8
    elif change == "longer":
        now += b"\0"
    elif change.endswith("shorter") and whole:
        del (now if change == "shorter" else there)[-1]
    given_pieces = [bytes(now[start : start + 7]) for start in range(0, len(now), 7)]
    with tempfile.TemporaryDirectory() as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "CHUNK_BYTES", chunk)
        earlier, goal = Path(base, "earlier"), Path(base, "goal")
        earlier.mkdir()
        goal.mkdir()
        (earlier / "x").write_bytes(there)
        entry = FileEntry("x", len(whole), "other", chunks)
        damaged = now == whole != there
        with (
            pytest.warns(UserWarning, match="earlier is damaged: its x is no longer")
            if damaged
            else nullcontext(),
            closing(Writer()) as writer,
        ):
            found = PreviousCheckpoint(earlier, {"x": entry}).link(
                "x", goal / "x", lambda file: [file.write(piece) for piece in given_pieces], writer.digest
            )
        assert (earlier / "x").read_bytes() == there
        if now == there == whole:
            assert found is entry
            assert (goal / "x").samefile(earlier / "x")
        else:
            assert found is None
            assert os.listdir(goal) == []


def test_the_earlier_file_is_read_while_the_new_bytes_are_compared(tmp_path: Path) -> None:
    # Also what does not change is not read behind the first chunk that does.
    size = links.CHUNK_BYTES
    earlier, goal = tmp_path / "earlier", tmp_path / "goal"
    earlier.mkdir()
    goal.mkdir()
    content = [os.urandom(size) for _ in range(3)]
    (earlier / "x").write_bytes(b"".join(content))
    entry = FileEntry("x", 3 * size, "other", tuple(map(xxhash.xxh3_128_hexdigest, content)))
    read: list[int] = []

    with closing(Writer()) as writer:

        def digest(path: Path, start: int, length: int) -> Future[str]:
            read.append(start)
            return writer.digest(path, start, length)

        def write(file: Any) -> None:
            file.write(content[0])
            assert read == [0]
            file.write(bytes(size))
            raise AssertionError("not stopped")

        assert PreviousCheckpoint(earlier, {"x": entry}).link("x", goal / "x", write, digest) is None
    assert read == [0]
    assert os.listdir(goal) == []
    assert (earlier / "x").read_bytes() == b"".join(content)


def test_a_file_that_changes_after_it_was_read_is_not_linked(tmp_path: Path) -> None:
    size = links.CHUNK_BYTES
    earlier, goal = tmp_path / "earlier", tmp_path / "goal"
    earlier.mkdir()
    goal.mkdir()
    content = [os.urandom(size) for _ in range(2)]
    (earlier / "x").write_bytes(b"".join(content))
    os.utime(earlier / "x", ns=(1, 1))  # long ago, whatever the clock of the file system
    entry = FileEntry("x", 2 * size, "other", tuple(map(xxhash.xxh3_128_hexdigest, content)))
    digests: list[Future[str]] = []

    with closing(Writer()) as writer:

        def digest(path: Path, start: int, length: int) -> Future[str]:
            digests.append(writer.digest(path, start, length))
            return digests[-1]

        def write(file: Any) -> None:
            file.write(content[0])
            digests[0].result()
            with open(earlier / "x", "r+b") as other:
                other.write(b"changed")
            file.write(content[1])

        with pytest.warns(UserWarning, match="its x is no longer what was saved"):
            assert PreviousCheckpoint(earlier, {"x": entry}).link("x", goal / "x", write, digest) is None
    assert os.listdir(goal) == []


@pytest.mark.parametrize("how", ["in place", "replaced", "cut off"])
def test_a_file_that_was_changed_since_is_written_again(tmp_path: Path, how: str) -> None:
    save(tmp_path / "checkpoint_0", 1.0)
    path = tmp_path / "checkpoint_0" / FROZEN
    before, times = path.read_bytes(), path.stat()
    damaged = before[:-1] + (b"" if how == "cut off" else b"\x01")
    if how == "replaced":
        path.unlink()
    with open(path, "r+b" if how == "in place" else "wb") as file:
        file.write(damaged)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # by its time it cannot be seen
    with pytest.warns(
        UserWarning, match=rf"checkpoint_0 is damaged: its {FROZEN} is no longer what was saved"
    ):
        save(tmp_path / "checkpoint_1", 2.0)

    assert linked(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1") == UNCHANGED - {FROZEN}
    assert (tmp_path / "checkpoint_1" / FROZEN).read_bytes() == before
    checkpoint.verify(tmp_path / "checkpoint_1")
    with pytest.raises(CorruptCheckpointError, match=FROZEN):
        checkpoint.verify(tmp_path / "checkpoint_0")


def test_damage_of_a_linked_file_is_noticed_in_each_checkpoint_that_has_it(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / f"checkpoint_{number}", float(number))
    with open(tmp_path / "checkpoint_0" / FROZEN, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    for number in range(2):
        with pytest.raises(CorruptCheckpointError, match=rf"{FROZEN} differs in bytes 0 to \d+, in base"):
            checkpoint.verify(tmp_path / f"checkpoint_{number}")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOENT])
def test_without_links_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path / "checkpoint_0", 1.0)

    def refuse(source: Path, goal: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path / "checkpoint_1", 2.0)
    assert linked(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1") == set()
    checkpoint.verify(tmp_path / "checkpoint_1")


def test_a_link_that_was_put_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_0", 1.0)
    path = tmp_path / "checkpoint_0" / FROZEN
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "checkpoint_1", 2.0)
    assert not (tmp_path / "checkpoint_1" / FROZEN).is_symlink()
    assert (tmp_path / "elsewhere").stat().st_nlink == 1
    checkpoint.verify(tmp_path / "checkpoint_1")


def test_a_linked_file_that_is_written_again_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_0", 1.0)
    before = content(tmp_path / "checkpoint_0")
    with staged(tmp_path / "checkpoint_1", incremental=True) as opened:
        write(opened, 2.0)
        opened.write({"base": torch.zeros(7)}, FROZEN, safe_serialization=True)
        (opened.path / OTHER).unlink()  # as a hook does it
        (opened.path / OTHER).write_text("its own")

    assert content(tmp_path / "checkpoint_0") == before
    assert tensors.load(tmp_path / "checkpoint_1" / FROZEN)["base"].tolist() == [0.0] * 7
    assert (tmp_path / "checkpoint_1" / OTHER).read_text() == "its own"
    checkpoint.verify(tmp_path / "checkpoint_1")


def test_a_linked_file_that_is_changed_in_place_during_the_save_fails_it(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_0", 1.0)

    def change() -> None:
        with staged(tmp_path / "checkpoint_1", incremental=True) as opened:
            write(opened, 2.0)
            with open(opened.path / FROZEN, "ab") as file:
                file.write(b"more")

    with pytest.raises(
        CorruptCheckpointError, match=f"{FROZEN} was changed while it was linked.* delete it first"
    ):
        change()
    assert os.listdir(tmp_path) == ["checkpoint_0"]


class Failing(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def test_an_error_of_what_is_saved_is_that_error(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint_0", 1.0)
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "checkpoint_1", incremental=True) as opened:
        opened.write([Failing()], OTHER)
    assert os.listdir(tmp_path) == ["checkpoint_0"]


def _save(folder: str, value: float, each_node: bool) -> list[str]:
    here = current_process()
    process = replace(here, local_rank=0, local_world_size=1) if each_node else here
    disk = Path(folder, f"disk{here.rank}" if each_node else "disk")
    with staged(
        disk / f"checkpoint_{value:.0f}", save_on_each_node=each_node, process=process, incremental=True
    ) as opened:
        if opened.writes_shared:
            write(opened, value)
        opened.write({"own": torch.tensor(value)}, f"random_states_{here.rank}.pkl")
    return sorted(linked(disk / f"checkpoint_{value - 1:.0f}", disk / f"checkpoint_{value:.0f}"))


@pytest.mark.parametrize("each_node", [False, True])
def test_on_two_processes_those_that_write_for_all_link(world: Any, tmp_path: Path, each_node: bool) -> None:
    world.run(_save, str(tmp_path), 1.0, each_node)
    found = world.run(_save, str(tmp_path), 2.0, each_node)
    assert found == [sorted(UNCHANGED)] * 2
    for folder in tmp_path.glob("*/checkpoint_2"):
        checkpoint.verify(folder)


class Once:
    """Lets the n-th of the calls that change the disk fail."""

    def __init__(self, at: int) -> None:
        self.left = at

    def wrapped(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return call


@pytest.mark.filterwarnings("ignore:.*cannot be deleted")
def test_an_error_at_any_point_leaves_the_earlier_checkpoint_and_at_most_a_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = []
    for at in range(100):
        root = tmp_path / str(at)
        save(root / "checkpoint_0", 1.0)
        before = content(root / "checkpoint_0")
        once = Once(at)
        with monkeypatch.context() as patched:
            for name in ("link", "write", "rename", "replace", "unlink", "mkdir", "fsync"):
                patched.setattr(os, name, once.wrapped(getattr(os, name)))
            with suppress(OSError):
                save(root / "checkpoint_1", 2.0)
        assert content(root / "checkpoint_0") == before
        found = rotation.checkpoints(root)
        for folder in found:
            checkpoint.verify(folder)
        there.append(len(found))
        save(root / "checkpoint_2", 3.0)
        assert linked(found[-1], root / "checkpoint_2") == UNCHANGED
        checkpoint.verify(root / "checkpoint_2")
        if once.left >= 0:
            break
    assert len(there) > 15
    assert set(there) == {1, 2}
    assert there[-1] == 2


# A child saves next to a checkpoint, or over it, and is killed at the n-th of these calls, or exits with 0.
LOOP = """
import os, signal, sys
from pathlib import Path
import torch
from accel_ckpt import checkpoint
from accel_ckpt.files import tensors
from accel_ckpt.folder import manifest, recovery, rotation
from accel_ckpt.folder.staging import staged

base = Path(sys.argv[1])
FROZEN = "model-00001-of-00002.safetensors"

def save(folder, value):
    with staged(folder, incremental=True) as opened:
        opened.write({"base": torch.arange(900.0)}, FROZEN, True)
        opened.write({"adapter": torch.full((3,), value)}, "model-00002-of-00002.safetensors", True)
        opened.facts["value"] = value

def child(kind, folder, at):
    count = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return function(*args, **kwargs)
        return call
    for name in ("link", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "write"):
        setattr(os, name, counted(getattr(os, name)))
    save(folder, 2.0)
    if kind == "beside":
        rotation.prune(folder.parent, 1, folder)

def value_of(folder):
    checkpoint.verify(folder)
    assert len(tensors.load(folder / FROZEN)["base"]) == 900
    value = manifest.read(folder).facts["value"]
    assert tensors.load(folder / "model-00002-of-00002.safetensors")["adapter"].tolist() == [value] * 3
    return value

def run(kind):
    for at in range(1000):
        root = base / kind / str(at)
        first = root / "checkpoint_0"
        save(first, 1.0)
        if kind == "in place":
            (first / "theirs").write_text("theirs")
        second = root / "checkpoint_1" if kind == "beside" else first
        pid = os.fork()
        if pid == 0:
            child(kind, second, at)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if kind == "beside":
            newest = rotation.latest(root)
            assert status or (newest == second and not first.exists())
            for folder in rotation.checkpoints(root):
                value_of(folder)
        else:
            newest = recovery.find(first)
        yield value_of(newest)
        save(root / "checkpoint_2", 3.0)
        # It goes on from what is there, unless that lost its name between two renames.
        assert newest.name[0] == "." or (root / "checkpoint_2" / FROZEN).samefile(newest / FROZEN)
        rotation.prune(root, 1)
        assert value_of(root / "checkpoint_2") == 3.0
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL

for kind in ("beside", "over", "in place"):
    print(*run(kind))
"""


@pytest.mark.long
def test_killed_at_any_point_both_checkpoints_are_complete_or_absent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for seen in map(str.split, lines):
        assert len(seen) > 12
        assert seen == sorted(seen)
        assert set(seen) == {"1.0", "2.0"}
