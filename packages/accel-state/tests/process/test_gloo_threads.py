"""Waiting for gloo's threads before a process group or the interpreter ends."""

from __future__ import annotations

import _thread
import hashlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_state import env
from accel_state.process import gloo_threads
from accel_state.process.gloo_threads import wait_for_gloo_threads
from accel_state.process.state import PartialState

THREAD = "pt_gloo_runloop"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked at through /proc")


@contextmanager
def busy_thread(name: str, rounds: int) -> Iterator[Callable[[], bool]]:
    """Run a thread that works without the interpreter's lock, as gloo's do; yield whether it still works."""
    started = threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield thread.is_alive
    finally:
        thread.join()


def test_waits_until_the_thread_is_done() -> None:
    with busy_thread(THREAD, 200_000) as works:
        assert works()
        wait_for_gloo_threads(limit_s=60)
        assert not works()


def test_waits_for_a_thread_that_wants_the_lock() -> None:
    """It mostly sleeps, as an idle one does; only the kernel is asked, repeatedly."""
    started, end = threading.Event(), time.monotonic() + 0.5

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
        started.set()
        while time.monotonic() < end:
            time.sleep(0.002)  # a wait in C++, say; then it needs the lock

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    wait_for_gloo_threads(limit_s=60)
    assert time.monotonic() >= end - 0.01
    thread.join()


def test_waits_no_longer_than_its_limit() -> None:
    with busy_thread(THREAD, 2_000_000) as works:
        begin = time.monotonic()
        wait_for_gloo_threads(limit_s=0.05)
        assert works()
        assert time.monotonic() - begin < 1


def test_other_threads_and_idle_ones_hold_nothing_up() -> None:
    with busy_thread("somebody else", 2_000_000) as works:
        wait_for_gloo_threads(limit_s=60)
        assert works()


def wait_without_names() -> bool:
    """Wait, as with a torch that gives gloo's threads no name, for a thread that Python does not know of."""
    started, end = threading.Event(), time.monotonic() + 0.5
    name = Path("/proc/self/comm").read_text().strip()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        started.set()
        while time.monotonic() < end:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    _thread.start_new_thread(work, ())
    started.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_threads, "_are_named", lambda: False)
        gloo_threads.wait_for_gloo_threads(limit_s=60)
    return end <= time.monotonic() < end + 20


@pytest.mark.core
def test_waits_for_threads_without_a_name(world: Any) -> None:
    assert world.run(wait_without_names, size=1) == [True]


def wait_for_idle_threads() -> float:
    """Return the seconds that it takes while gloo's threads wait and poll."""
    dist.all_reduce(torch.ones(1))
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    begin = time.monotonic()
    wait_for_gloo_threads(limit_s=60)
    seconds = time.monotonic() - begin
    for group in groups:
        dist.destroy_process_group(group)
    return seconds


@pytest.mark.core
def test_idle_threads_of_gloo_hold_nothing_up(world: Any) -> None:
    assert max(world.run(wait_for_idle_threads, size=2)) < 20


EXIT_RIGHT_AFTER_A_COLLECTIVE = """
import os, warnings
import torch, torch.distributed as dist
from accel_state.process.state import PartialState

warnings.simplefilter("ignore")
state = PartialState(init_method=f"file://{os.environ['STORE']}")
kept = dist.group.WORLD  # as a DDP model keeps it: its threads outlive destroy_process_group
tensors = [torch.ones(1) for _ in range(200_000)]  # which a thread of gloo lets go of one by one
dist.all_reduce_coalesced(tensors)
"""


@pytest.mark.long
def test_a_script_may_end_right_after_a_collective(tmp_path: Path) -> None:
    """Without wait_for_gloo_threads, about one in three of these processes aborts."""
    place = {"STORE": str(tmp_path / "store"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT_RIGHT_AFTER_A_COLLECTIVE],
            env={**env.snapshot(), **place, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    errors = [worker.communicate(timeout=240)[1] for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], errors


def destroy_while_held(folder: str) -> None:
    """End groups that a model holds a little longer."""
    warnings.simplefilter("ignore", FutureWarning)  # of all_reduce_coalesced
    rounds = 10
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # the interpreter's lock is given away at a wait alone
    try:
        for number in range(rounds):
            state = PartialState()
            rank = state.process_index
            held = DistributedDataParallel(torch.nn.Linear(4, 4))
            held(torch.ones(2, 4)).sum().backward()
            dist.all_reduce_coalesced([torch.ones(1) for _ in range(2000)])  # gloo lets go of one by one
            gathered = [torch.empty(3) for _ in range(2)]
            dist.all_gather(gathered, torch.ones(3))
            state.destroy_process_group()
            PartialState._reset_state()
            del held
            if number < rounds - 1:
                store = dist.FileStore(f"{folder}/store{number}", 2)  # type: ignore[attr-defined]
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.core
def test_a_group_that_is_held_after_its_end_does_not_hang(world: Any, tmp_path: Path) -> None:
    """Without wait_for_gloo_threads, both processes hang in the first rounds."""
    world.run(destroy_while_held, str(tmp_path), size=2)
