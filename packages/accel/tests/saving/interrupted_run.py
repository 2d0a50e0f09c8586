"""A run whose save is interrupted at every point in turn; test_interruptions.py starts it.

Reads lines from stdin: folder, mode, processes and victim, with tabs between. Answers each with the newest
checkpoint at every point, or with nothing if something went wrong: <folder>/stderr says what. Everything is
forked, so that torch is imported once. A mode that ends in "in place" saves into a folder that others use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt.config import ProjectConfiguration
from accel_ckpt.files import piece_file
from accel_ckpt.folder import manifest, recovery, rotation

STEPS, TOTAL = 2, 6  # between saves, in all
FIRST_USED = (  # what is imported on first use: by optimizers, and by what every point does
    "torch._dynamo",
    "torch.utils.serialization.config",
    "accel.saving.save",
    "accel.engines.ddp",
    "accel.engines.fsdp2",
    "accel.engines.single",
    "accel.saving.load",
    "accel_ckpt.background.snapshot",
    "accel_ckpt.training_state.load",
    "accel_ckpt.sharded.save_load",
    "accel_ckpt.training_state.save",
    "safetensors",
)
CALLS = ("write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
MOVES = ("rename", "replace", "unlink")
ERRORS = {"full": errno.ENOSPC, "ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}


class Count:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Run:
    """A small run with everything that a checkpoint holds."""

    in_parts = False
    in_place = False
    width = 4

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.place = str(folder / "state") if self.in_place else None
        naming = ProjectConfiguration(
            str(folder), automatic_checkpoint_naming=not self.in_place, total_limit=1
        )
        sharded = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if self.in_parts else {}
        self.accelerator = Accelerator(cpu=True, project_config=naming, **sharded)
        first, last = torch.nn.Linear(3, self.width), torch.nn.Linear(self.width, 1)
        model = torch.nn.Sequential(first, torch.nn.Dropout(0.5), last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        data = TensorDataset(torch.arange(120.0).reshape(40, 3) / 50, torch.arange(40.0).reshape(40, 1))
        loader = DataLoader(data, batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

        self.batches = self.forever()

    def forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, until: int) -> None:
        while self.count.step < until:
            x, y = next(self.batches)
            self.accelerator.backward((self.model(x) - y).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.count.step += 1

    def digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            whole = parameter.full_tensor() if self.in_parts else parameter
            digest.update(whole.detach().numpy().tobytes())
        return digest.hexdigest()


class Injection:
    """Lets the n-th call that changes the disk kill this process, or fail: once, or as on a full disk."""

    def __init__(self, at: int, mode: str) -> None:
        self.at, self.mode, self.count = at, mode, 0
        self.lock = threading.Lock()
        for name in MOVES if mode in ERRORS and mode != "full" else CALLS:
            setattr(os, name, self.wrapped(getattr(os, name), name))

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                here = self.count == self.at
                self.count += 1
            if here and self.mode not in ERRORS:
                if name == "write":
                    with contextlib.suppress(OSError):  # past the cache half a block cannot be written
                        function(args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            full = self.mode == "full" and self.count > self.at and name in ("write", "fsync", "mkdir")
            if full or (here and self.mode != "full"):
                raise OSError(ERRORS[self.mode], os.strerror(ERRORS[self.mode]))
            return function(*args, **kwargs)

        return call

    def stop(self) -> bool:
        """Whether the point was reached; from now on nothing is injected."""
        reached, self.at = self.count > self.at, sys.maxsize
        return reached


class Counted(io.FileIO):
    def write(self, data: Any, /) -> int:
        return os.write(self.fileno(), data)


def open_counted(path: Path, mode: str) -> Any:
    """Open as the built-in does, so that writes of the manifest are points too."""
    if mode != "wb":
        return open(path, mode)
    return io.BufferedWriter(Counted(path, mode), piece_file.PIECE_BYTES)


def trained(folder: Path) -> Run:
    """A run that has resumed, and trained up to its next save."""
    run = Run(folder)
    run.accelerator.load_state(run.place)
    run.train(2 * STEPS)
    return run


def interrupted(run: Run, mode: str, at: int) -> int:
    """Save with an interruption; return 0 if the point lies behind the end of the save."""
    if mode == "size":
        return too_large(run, at)
    injection = Injection(at, mode)
    try:
        run.accelerator.save_state(run.place, blocking=mode != "async")
        if mode == "async":
            run.train(2 * STEPS + 1)
        run.accelerator.wait_for_save()
    except OSError as error:
        if error.errno != ERRORS.get(mode):
            raise
        injection.stop()
        return 7
    return 7 if injection.stop() else 0


def too_large(run: Run, at: int) -> int:
    limit = 970 * at
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run.accelerator.save_state()
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return 7
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return 0


def newest_in(folder: Path) -> str:
    """The name of the newest checkpoint; in place the name that it would have."""
    if not Run.in_place:
        return rotation.checkpoints(folder / "checkpoints")[-1].name
    first, found = (manifest.read(recovery.find(base / "state")) for base in (folder.parent / "base", folder))
    assert first is not None
    assert found is not None
    return f"checkpoint_{int(first.facts['save'] != found.facts['save'])}"


def resumed(folder: Path, expected: str) -> int:
    """Resume without naming a folder, train to the end, and save again."""
    newest = newest_in(folder)
    run = Run(folder)
    run.accelerator.wait_for_everyone()
    run.accelerator.load_state(run.place)
    assert run.count.step == {"checkpoint_0": STEPS, "checkpoint_1": 2 * STEPS}[newest]
    run.train(TOTAL)
    assert run.digest() == expected, "the resumed run differs"
    saved = Path(run.accelerator.save_state(run.place))
    run.accelerator.wait_for_everyone()
    assert manifest.is_complete(saved)
    left = sorted(os.listdir(saved.parent))
    assert left == [saved.name], left
    if run.place is not None:
        assert (saved / "theirs").read_text() == "theirs"
        assert not list(saved.glob(".staging-*"))
    run.accelerator.end_training()
    return 0


def forked(function: Callable[[int], int], size: int, base: Path) -> list[int]:
    """Call a function in fresh processes of one group, by rank; return their process ids."""
    meeting = base / f"meeting-{time.monotonic_ns()}"
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                if size > 1:
                    os.environ.update(
                        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
                    )
                    os.environ["ACCELERATE_DEBUG_RDV_FILE"] = str(meeting)
                code = function(rank)
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    return pids


def ended(pid: int, within_s: float) -> int | None:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def stopped(pids: list[int], victim: int, patience_s: float) -> int:
    """Wait for the victim, then for the others as a launcher does, and kill them at the end."""
    code = ended(pids[victim], 60)
    for pid in pids:
        if (pid != pids[victim] or code is None) and ended(pid, patience_s) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert code is not None, "the victim hangs"
    return code


def straight(folder: Path) -> int:
    """The uninterrupted run: saves after two steps, and writes down how it ends."""
    run = Run(folder / "base")
    run.train(STEPS)
    if run.place is not None:
        Path(run.place).mkdir(parents=True, exist_ok=True)
        Path(run.place, "theirs").write_text("theirs")
    run.accelerator.save_state(run.place)
    run.train(TOTAL)
    digest = run.digest()
    if run.accelerator.is_main_process:
        (folder / "expected").write_text(digest)
    run.accelerator.end_training()
    return 0


def left_by(base: Path, mode: str, size: int, victim: int) -> Iterator[tuple[Path, int]]:
    """Interrupt the save at each point, behind the last of which it ends well.

    Yields:
        The folder that the interruption leaves, and the victim's exit code.
    """
    folder = base / "run"  # one name for all points: a run that was forked knows it
    pair: list[Run] = []
    for at in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base / "base", folder)
        if size == 1 and not pair:
            pair.append(trained(folder))  # each point is a fork of it

        def save(rank: int, at: int = at) -> int:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                run = pair[0] if pair else trained(folder)
                return interrupted(run, mode, at if rank == victim else sys.maxsize)

        # At some points others notice the loss by themselves, which takes seconds; else they are killed too.
        code = stopped(forked(save, size, base), victim, 10 if at % 4 == 1 else 0)
        assert code in ((0, 7) if mode in (*ERRORS, "size") else (0, -signal.SIGKILL)), (at, code)
        left = base / f"left{at}"
        folder.rename(left)
        yield left, code
        if code == 0:
            return


def what_is_left(folder: Path) -> frozenset[tuple[str, bytes]]:
    """The files of a folder with their contents.

    The contents of a staging folder without a manifest do not count: nothing reads them. Folders that were
    sealed are never the same, as each save's name is in its manifest.
    """
    found = set()
    for path in folder.rglob("*"):
        name = re.sub(r"\d+-[0-9a-f]{8}", "", path.relative_to(folder).as_posix())
        staging = next((p for p in path.parents if ".staging-" in p.name), None)
        counts = path.is_file() and (staging is None or manifest.is_complete(staging))
        found.add((name, path.read_bytes() if counts else b""))
    return frozenset(found)


def interrupt_everywhere(base: Path, mode: str, size: int, victim: int) -> list[str]:
    """Return the newest checkpoint at every point; what is left there is resumed, equal folders once."""
    if mode.endswith(" in place"):
        Run.in_place, mode = True, mode.removesuffix(" in place")
    if mode == "parts":
        Run.in_parts, mode = True, "kill"
    # Small pieces make more points. One process tries unfinished files that end anywhere, in milliseconds a
    # point; a point of several processes takes a second of each.
    piece_file.PIECE_BYTES = 2**11 if size > 1 else 256
    if mode == "kill past the cache":
        # Whole blocks, also in half: smaller pieces go through the system's cache.
        Run.width, piece_file.PIECE_BYTES, mode = 600, 2**12, "kill"
    assert {ended(pid, 60) for pid in forked(lambda _: straight(base), size, base)} == {0}
    expected = (base / "expected").read_text()

    def points(writing: int) -> int:
        with os.fdopen(writing, "w") as lines:
            for left, _ in left_by(base, mode, size, victim):
                lines.write(f"{left}\n")
                lines.flush()
        return 0

    reader, writing = os.pipe()
    (pid,) = forked(lambda _: points(writing), 1, base)  # whose accelerator is not that of what resumes
    os.close(writing)
    newest, seen = [], set()
    with os.fdopen(reader) as lines:
        for folder in map(Path, lines.read().splitlines()):
            newest.append(newest_in(folder))
            left = what_is_left(folder)
            if left not in seen:
                seen.add(left)
                codes = [ended(pid, 60) for pid in forked(lambda _: resumed(folder, expected), size, base)]  # noqa: B023
                assert set(codes) == {0}, (folder, codes)
    assert ended(pid, 60) == 0
    print(f"{len(seen)} of {len(newest)} folders were resumed", file=sys.stderr)
    return newest


def main() -> None:
    torch.set_num_threads(1)
    vars(manifest)["open"] = open_counted
    for name in FIRST_USED:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, mode, size, victim = line.rstrip("\n").split("\t")
        base = Path(folder)

        def case(
            _: int, base: Path = base, arguments: tuple[str, int, int] = (mode, int(size), int(victim))
        ) -> int:
            with open(base / "stderr", "w") as file:
                os.dup2(file.fileno(), 2)
            (base / "newest").write_text(" ".join(interrupt_everywhere(base, *arguments)))
            return 0

        (pid,) = forked(case, 1, base)
        os.waitpid(pid, 0)
        newest = base / "newest"
        print(newest.read_text() if newest.exists() else "", flush=True)


if __name__ == "__main__":
    main()
