from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from accel_ckpt.errors import CheckpointError
from accel_ckpt.file_names import MANIFEST
from accel_ckpt.files import digests
from accel_ckpt.folder import commit, manifest, recovery
from accel_ckpt.folder.staging import staged

NAMES = ("model.safetensors", "optimizer.bin")


def put(folder: Path, text: str, names: tuple[str, ...] = NAMES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def save(target: Path, text: str, names: tuple[str, ...] = NAMES) -> Path:
    staging = commit.staging_path(target, commit.new_token())
    put(staging, text, names)
    commit.seal(staging, {"text": text})
    commit.commit(staging, target)
    return staging


def content(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in manifest.files_in(folder)}


def fact(folder: Path) -> str:
    read = manifest.read(folder)
    assert read is not None
    return str(read.facts["text"])


def names_beside(target: Path) -> list[str]:
    return sorted(os.listdir(target.parent))


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "c"
    staging = commit.staging_path(target, commit.new_token())
    assert staging.parent == tmp_path
    assert staging.name.startswith(".c.staging-")
    put(staging, "one")
    commit.seal(staging, {"text": "one"})
    assert not target.exists()
    commit.commit(staging, target)

    assert content(target) == dict.fromkeys(NAMES, "one")
    assert fact(target) == "one"
    assert names_beside(target) == ["c"]
    assert recovery.find(target) == target


def test_saves_to_new_names_leave_no_memory_behind(tmp_path: Path) -> None:
    def save_some(first: int) -> int:
        for number in range(first, first + 30):
            save(tmp_path / f"checkpoint_{number}", "one")
            recovery.sweep(tmp_path / f"checkpoint_{number}")
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = save_some(0)
        assert save_some(30) - before < 12_000  # each pattern of glob took 1.2 kB, and a save has five
    finally:
        tracemalloc.stop()


def test_an_old_checkpoint_is_replaced_with_all_its_files(tmp_path: Path) -> None:
    target = tmp_path / "c"
    save(target, "one", (*NAMES, "model_1.safetensors", "sub/hook.txt"))
    save(target, "two")

    assert content(target) == dict.fromkeys(NAMES, "two")
    assert names_beside(target) == ["c"]


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "run"
    put(target / "logs", "theirs", ("events",))
    put(target, "theirs", ("config.json", "model.safetensors"))
    staging = save(target, "one", (*NAMES, "model_1.safetensors"))
    assert staging.parent == target
    save(target, "two")

    assert content(target) == {
        **dict.fromkeys(NAMES, "two"),
        "logs/events": "theirs",
        "config.json": "theirs",
    }
    assert fact(target) == "two"
    assert sorted(os.listdir(target)) == sorted([*NAMES, "logs", "config.json", MANIFEST])


def test_the_current_folder_is_not_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "here"
    target.mkdir()
    monkeypatch.chdir(target)
    inode = target.stat().st_ino
    for text in ("one", "two"):
        save(target, text)
        assert content(Path()) == dict.fromkeys(NAMES, text)
    assert target.stat().st_ino == inode


def test_an_empty_folder_and_a_damaged_checkpoint_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "c"
    target.mkdir()
    save(target, "one")
    (target / MANIFEST).write_text("rubbish")
    assert save(target, "two").parent == tmp_path
    assert content(target) == dict.fromkeys(NAMES, "two")


def test_a_file_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("x")
    with pytest.raises(CheckpointError, match=r"is a file\. Save into a folder, or delete the file"):
        commit.staging_path(tmp_path / "c", commit.new_token())


def test_a_rejected_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "c"
    save(target, "one")
    rename = os.rename

    def refuse(source: Path, goal: Path) -> None:
        if ".staging-" in str(source):
            raise PermissionError(13, "refused")
        rename(source, goal)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="refused"):
        save(target, "two")
    assert fact(target) == "one"


# Interrupted saves

# A child saves over an old checkpoint and is killed at the n-th of these calls; else it exits with 0.
KILLED = """
import os, signal, sys
from pathlib import Path
from accel_ckpt.folder import commit

target, kind = Path(sys.argv[1]), sys.argv[2]
names = ("model.safetensors", "optimizer.bin", "sub/x")

def child(at):
    if kind == "in-place":
        (target / "theirs").write_text("theirs")
    count = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return function(*args, **kwargs)
        return call
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "write"):
        if hasattr(os, name):
            setattr(os, name, counted(getattr(os, name)))
    staging = commit.staging_path(target, commit.new_token())
    for name in names:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text("two")
    commit.seal(staging, {"text": "two"})
    commit.commit(staging, target)

at = int(sys.argv[3])
child(at)
"""

LOOP = """
import os, sys, shutil, subprocess
from pathlib import Path
from accel_ckpt.folder import commit, manifest, recovery
exec(open(sys.argv[4]).read().split("at = int")[0])

base, seen = Path(sys.argv[1]).parent, []
for at in range(1000):
    target = base / f"c{at}"
    names_old = ("model.safetensors", "optimizer.bin", "old.bin")
    staging = commit.staging_path(target, commit.new_token())
    staging.mkdir()
    for name in names_old:
        (staging / name).write_text("one")
    commit.seal(staging, {"text": "one"})
    commit.commit(staging, target)
    pid = os.fork()
    if pid == 0:
        child(at)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    found = recovery.find(target)
    described = manifest.read(found)
    text = described.facts["text"]
    expected = names if text == "two" else names_old
    assert described.paths() == set(expected), (at, described.paths())
    for name in expected:
        assert (found / name).read_text() == text, (at, name)
    from accel_ckpt.files import digests
    digests.verify(found, described.files)
    if kind == "in-place":
        assert (target / "theirs").read_text() == "theirs"
    # the next save works, and leaves nothing of the interrupted one
    staging = commit.staging_path(target, commit.new_token())
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_text("three")
    commit.seal(staging, {"text": "three"})
    commit.commit(staging, target)
    assert manifest.read(recovery.find(target)).facts["text"] == "three"
    left = [name for name in os.listdir(base) if name.startswith(f".c{at}.")]
    left += [name for name in os.listdir(target) if name.startswith(".")]
    assert not left, (at, left)
    seen.append(text)
    if status == 0:
        break
print(" ".join(seen))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["swap", "in-place"])
def test_killed_at_any_point_there_is_a_complete_checkpoint(tmp_path: Path, kind: str) -> None:
    (tmp_path / "child.py").write_text(KILLED)
    (tmp_path / "loop.py").write_text(LOOP)
    base = tmp_path / "base"
    base.mkdir()
    done = subprocess.run(
        [sys.executable, "loop.py", str(base / "c"), kind, "0", "child.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.split()

    # Old ones up to a point, new ones from there on; the last run was not killed.
    assert len(seen) > 15
    assert seen == sorted(seen)
    assert set(seen) == {"one", "two"}


CALLS = ("rename", "replace", "unlink", "mkdir", "fsync")


def save_whole(target: Path, text: str, names: tuple[str, ...] = (*NAMES, "sub/x")) -> None:
    with staged(target) as staging:
        put(staging.path, text, names)
        staging.facts["text"] = text


class Failing:
    """Lets the n-th of the calls that change the disk fail, alone or with all that follow."""

    def __init__(self, at: int, number: int, for_good: bool) -> None:
        self.at, self.count, self.number, self.for_good = at, 0, number, for_good

    def wrapped(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.at or (self.for_good and self.count > self.at):
                raise OSError(self.number, os.strerror(self.number))
            return function(*args, **kwargs)

        return call


@pytest.mark.filterwarnings("ignore:.*cannot be deleted")
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("kind", ["new", "swap", "in place"])
def test_an_error_at_any_point_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, for_good: bool
) -> None:
    seen: list[str] = []  # what is there after each save
    failed: list[str] = []  # the same, of those that have failed
    for at in range(100):
        target = tmp_path / f"c{at}"
        if kind == "in place":
            put(target, "theirs", ("theirs",))
        if kind != "new":
            save_whole(target, "one", (*NAMES, "old.bin"))
        failing = Failing(at, number, for_good)
        with monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, failing.wrapped(getattr(os, name)))
            try:
                save_whole(target, "two")
                told = ""
            except OSError as error:
                told = str(error)
        assert not told or os.strerror(number) in told
        try:
            found = recovery.find(target)
            seen.append(fact(found))
        except FileNotFoundError:
            assert kind == "new"
            assert told
            seen.append("none")
        else:
            described = manifest.read(found)
            assert described is not None
            digests.verify(found, described.files)
            expected = ("theirs",) if kind == "in place" else ()
            there = {name for name in content(found) if not name.startswith(".staging-")}
            assert there == {*described.paths(), *expected}, at
            assert {content(found)[name] for name in described.paths()} == {seen[-1]}
            assert all(content(found)[name] == "theirs" for name in expected)
            if "is kept in" in told:
                assert seen[-1] == "two"
        failed += seen[-1:] if told else []
        save_whole(target, "three")
        assert fact(recovery.find(target)) == "three"
        assert names_beside(target) == [f"c{number}" for number in sorted(range(at + 1), key=str)]
        assert not list(target.glob(".staging-*"))
        if failing.count <= at:
            break

    assert seen[-1] == "two"
    assert len(failed) > {"new": 8, "swap": 10, "in place": 12}[kind]
    assert sorted(failed, key=["none", "one", "two"].index) == failed


def test_what_is_in_the_way_is_reported_before_anything_is_moved(tmp_path: Path) -> None:
    target = tmp_path / "c"
    save_whole(target, "one", NAMES)
    put(target / "sub", "theirs", ("x/theirs",))
    with pytest.raises(CheckpointError, match=r"c/sub/x is in the way of sub/x, a file of the checkpoint"):
        save_whole(target, "two")
    (target / "notes").touch()
    with pytest.raises(CheckpointError, match=r"c/notes is in the way of notes/x"):
        save_whole(target, "two", ("notes/x",))
    assert fact(recovery.find(target)) == "one"
    assert sorted(os.listdir(target)) == sorted([*NAMES, "notes", "sub", MANIFEST])


def test_a_name_that_a_hook_may_use_can_be_loaded_and_saved_over(tmp_path: Path) -> None:
    name = "eval_12:30:00.json"
    save_whole(tmp_path / "c", "one", (*NAMES, name))
    assert content(recovery.find(tmp_path / "c")) == dict.fromkeys((*NAMES, name), "one")
    assert manifest.read(tmp_path / "c") is not None
    save_whole(tmp_path / "c", "two")
    assert fact(tmp_path / "c") == "two"


@given(st.text(st.sampled_from("aC:.\\ ~\n\u00e9\udcff"), min_size=1, max_size=5))
@example("C:a")
@example("a\\b")
@example("a:b")
def test_a_name_is_rejected_when_it_is_saved_or_can_be_loaded(name: str) -> None:
    assume(name not in (".", ".."))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "c")
        try:
            save_whole(target, "one", (*NAMES, name))
        except CheckpointError as error:
            assert "a checkpoint cannot hold" in str(error)  # noqa: PT017
            assert "\\" in name or name[1:2] == ":"
            assert os.listdir(folder) == []
        else:
            described = manifest.read(target)
            assert described is not None
            assert name in described.paths()


def test_between_the_renames_the_new_one_is_found(tmp_path: Path) -> None:
    target = tmp_path / "c"
    save(target, "one")
    staging = commit.staging_path(target, commit.new_token())
    put(staging, "two")
    commit.seal(staging, {"text": "two"})
    os.rename(target, tmp_path / ".c.replaced-x")

    assert recovery.find(target) == staging
    recovery.discard(staging)
    assert fact(recovery.find(target)) == "one"


def test_an_unsealed_folder_is_never_found(tmp_path: Path) -> None:
    target = tmp_path / "c"
    put(commit.staging_path(target, commit.new_token()), "one")
    save(tmp_path / "other", "x")
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*/c\. There is: other\."):
        recovery.find(target)


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "c", "one")
    (tmp_path / "latest").symlink_to("c")

    assert recovery.find(tmp_path / "latest") == tmp_path / "c"


def test_special_characters_in_names(tmp_path: Path) -> None:
    for name in ("run [1]", "a*b", "what?"):
        target = tmp_path / name
        left = tmp_path / f".{name}.staging-{socket.gethostname()}-{os.getpid()}-00000000"
        put(left, "old")
        save(target, "one")
        assert fact(recovery.find(target)) == "one"
        assert not left.exists()


def test_what_others_may_be_writing_is_left_alone(tmp_path: Path) -> None:
    host = socket.gethostname()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(timeout=120)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        kept = [
            f".c.staging-{host}-{alive.pid}-00000000",
            f".c.staging-elsewhere-{ended.pid}-00000000",
            ".c.staging-odd",
        ]
        gone = [f".c.staging-{host}-{os.getpid()}-00000000", ".c.replaced-elsewhere-1-11111111"]
        for name in (*kept, *gone):
            put(tmp_path / name, "x")
        week_ago = time.time() - 7 * 24 * 3600
        os.utime(tmp_path / gone[1], (week_ago, week_ago))
        save(tmp_path / "c", "one")

        assert names_beside(tmp_path / "c") == sorted([*kept, "c"])
        alive.communicate(b"\n")


def test_no_process_is_requested_where_that_would_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(recovery.sys, "platform", "win32")
    monkeypatch.setattr(recovery.os, "kill", lambda pid, number: asked.append(pid))
    left = tmp_path / f".c.staging-{socket.gethostname()}-1-00000000"
    put(left, "x")
    recovery.sweep(tmp_path / "c")
    assert left.exists()
    week_ago = time.time() - 7 * 24 * 3600
    os.utime(left, (week_ago, week_ago))
    recovery.sweep(tmp_path / "c")

    assert not left.exists()
    assert asked == []


def test_everything_is_flushed_before_the_manifest_and_it_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note(handle: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def moved(source: Path, goal: Path) -> None:
        flushed.append("rename")
        rename(source, goal)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", moved)
    target = tmp_path / "c"
    staging = save(target, "one", (*NAMES, "sub/between/x"))

    files = [str(staging / name) for name in (*NAMES, "sub/between/x")]
    assert sorted(flushed[:3]) == sorted(files)
    assert flushed[3].startswith(str(staging / f".{MANIFEST}."))
    assert sorted(flushed[4:7]) == [str(staging / name) for name in ("", "sub", "sub/between")]
    assert flushed[7:] == ["rename", str(tmp_path)]


def test_in_place_all_folders_are_flushed_before_the_manifest_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "c"
    put(target, "theirs", ("notes.txt",))
    staging = commit.staging_path(target, commit.new_token())
    put(staging, "one", (*NAMES, "sub/between/x"))
    commit.seal(staging, {"text": "one"})
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note(handle: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def moved(source: Path, goal: Path) -> None:
        done.append(Path(source).name)
        replace(source, goal)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", moved)
    commit.commit(staging, target)

    assert set(done[:3]) == {*NAMES, "x"}
    assert sorted(done[3:6]) == [str(target / name) for name in ("", "sub", "sub/between")]
    assert done[6:] == [MANIFEST, str(target)]
