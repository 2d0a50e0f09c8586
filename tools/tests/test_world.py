"""The persistent world: results, failures of every kind, replacement of workers."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_world import exchange
from accel_world.program import run_program
from accel_world.report import WorldFailure


def start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)  # None: nothing chose one


def add_ranks(base: int) -> int:
    value = torch.tensor(base + dist.get_rank())
    dist.all_reduce(value)
    return int(value)


def pid() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.barrier()


def sleep_on(rank: int, seconds: float) -> int:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return os.getpid()


def sleep_in_a_child():
    time.sleep(60)


def wait_for_a_child():
    if os.fork() == 0:
        sleep_in_a_child()
    os.wait()


def take_the_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def fail_or_sleep() -> None:
    if dist.get_rank() == 0:
        raise KeyError("the reason")
    time.sleep(60)


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(3)
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def segfault_on(rank: int) -> None:
    if dist.get_rank() == rank:
        faulthandler._sigsegv()
    dist.barrier()


def exit_and_leave_a_child() -> None:
    if os.fork() == 0:  # the child inherits the socket, so that only the end of the process tells
        time.sleep(60)
    os._exit(4)


def compare(a: int, b: int) -> None:
    assert a == b


def return_lock() -> object:
    return threading.Lock()


def environment() -> dict[str, str]:
    os.environ["LEFT_BEHIND"] = "1"
    return dict(os.environ)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(12,)).start()


def raise_in_thread() -> None:
    thread = threading.Thread(target=compare, args=(1, 2))
    thread.start()
    thread.join()


def is_initialized() -> bool:
    return dist.is_initialized()


def fail_to_connect(store: str) -> None:
    if os.environ["RANK"] == "1":
        with pytest.raises(Exception, match=r"(?i)timed? ?out"):
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, 2),
                rank=1,
                world_size=2,
                timeout=datetime.timedelta(seconds=0.2),
            )


def speak() -> None:
    print("spoken by", dist.get_rank())


class Value:
    def __init__(self, number: int) -> None:
        self.number = number


def double(value: Value) -> Value:
    return Value(2 * value.number)


def test_results_come_in_rank_order(world):
    assert world.run(add_ranks, 10) == [21, 21]
    assert world.run(add_ranks, base=0, size=3) == [3, 3, 3]
    assert world.run(add_ranks, 5, size=1) == [5]


def test_workers_persist_across_runs(world):
    assert world.run(pid) == world.run(pid)


def test_classes_of_the_test_file_travel(world):
    assert [value.number for value in world.run(double, Value(4))] == [8, 8]


def test_loaders_fork_their_workers_on_linux(world):
    assert [start_method(), *world.run(start_method)] == ["fork"] * 3


def test_without_init_there_is_no_group(world):
    assert world.run(is_initialized, init=False) == [False, False]
    assert world.run(is_initialized) == [True, True]


def test_a_rank_that_returns_at_once_does_not_break_the_others(world):
    for _ in range(20):
        world.run(pid)


def test_a_failed_initialisation_leaves_a_working_world(world, tmp_path):
    world.run(fail_to_connect, str(tmp_path / "store"), init=False)
    assert world.run(add_ranks, 0, timeout_s=5) == [1, 1]


def test_exception_while_the_other_rank_waits_in_a_collective(world):
    pids = world.run(pid)
    begin = time.monotonic()
    with pytest.raises(WorldFailure, match="rank 0 raised, rank 1 raised") as info:
        world.run(fail_on, 0)
    assert time.monotonic() - begin < 10
    assert "KeyError: 'the reason'" in str(info.value)
    assert "dist.barrier()" in str(info.value)
    assert world.run(pid) == pids


def test_exception_while_the_other_rank_is_stuck(world):
    pids = world.run(pid)
    with pytest.raises(WorldFailure, match="rank 0 returned, rank 1 stuck") as info:
        world.run(sleep_on, 1, 60.0, timeout_s=0.5)
    assert "in sleep_on" in str(info.value)
    after = world.run(pid)
    assert after[0] == pids[0]
    assert after[1] != pids[1]


def test_a_run_with_a_handler_of_its_own_leaves_stacks_to_be_reported(world):
    world.run(take_the_signal)
    with pytest.raises(WorldFailure, match="rank 1 stuck") as info:
        world.run(sleep_on, 1, 60.0, timeout_s=0.5)
    assert "in sleep_on" in str(info.value)


def test_a_stuck_rank_comes_with_the_stacks_of_its_children(world):
    with pytest.raises(WorldFailure, match="rank 0 stuck") as info:
        world.run(wait_for_a_child, size=1, timeout_s=0.5)
    assert "in wait_for_a_child" in str(info.value)
    assert "in sleep_in_a_child" in str(info.value)


def test_exception_while_the_other_rank_does_something_else(world, monkeypatch):
    monkeypatch.setattr(exchange, "GRACE_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(WorldFailure, match="rank 0 raised, rank 1 stuck") as info:
        world.run(fail_or_sleep)
    assert "in fail_or_sleep" in str(info.value)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("function", "args", "account"),
    [
        (exit_on, (1,), "exit code 3"),
        (kill_on, (1,), "killed by SIGKILL"),
        (segfault_on, (1,), "killed by SIGSEGV"),
    ],
)
def test_a_dead_worker_is_reported_and_replaced(world, function, args, account):
    with pytest.raises(WorldFailure, match="rank 1 died") as info:
        world.run(function, *args)
    assert account in str(info.value)
    assert world.run(add_ranks, 0) == [1, 1]


def test_a_dead_worker_with_a_living_child_is_noticed_immediately(world):
    begin = time.monotonic()
    with pytest.raises(WorldFailure, match="rank 0 died"):
        world.run(exit_and_leave_a_child, size=1, init=False)
    assert time.monotonic() - begin < 10


def test_an_interrupted_run_leaves_a_working_world(world):
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    world.run(pid)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            world.run(sleep_on, 0, 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert world.run(add_ranks, 0) == [1, 1]


KILLED = """
import os, signal, threading, time
from importlib.util import find_spec
from pathlib import Path
from accel_world.pool import World
from sleeper import sleep

world = World()
world.run(sleep, 0)
print(world._starter._process.pid, *(worker.pid for worker in world._workers.values()), flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
world.run(sleep, 60)
"""


def test_busy_workers_do_not_outlive_a_killed_pytest(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time\ndef sleep(seconds): time.sleep(seconds)\n")
    paths = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{tmp_path}", "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, env=os.environ | paths, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert len(run.stdout.split()) == 3
    files = [Path(f"/proc/{pid}/cmdline") for pid in run.stdout.split()]
    until = time.monotonic() + 5
    while any(_runs(file) for file in files) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(file) for file in files)


def _runs(cmdline: Path) -> bool:
    return cmdline.exists() and cmdline.read_bytes() != b""  # empty for a zombie


def test_asserts_say_what_was_compared(world):
    with pytest.raises(WorldFailure, match="assert 1 == 2"):
        world.run(compare, 1, 2)


def test_a_result_that_cannot_be_pickled(world):
    with pytest.raises(WorldFailure, match="returned lock, which cannot be pickled"):
        world.run(return_lock)


def test_arguments_that_cannot_be_pickled(world):
    with pytest.raises(TypeError, match="cannot be pickled"):
        world.run(compare, threading.Lock(), 2)


def test_functions_that_another_process_cannot_find(world):
    def closure() -> None:
        pass

    with pytest.raises(TypeError, match="top level of a module"):
        world.run(closure)
    with pytest.raises(TypeError, match="top level of a module"):
        world.run(lambda: None)
    with pytest.raises(TypeError, match="top level of a module"):
        world.run(os.getpid)


def test_size_out_of_range(world):
    with pytest.raises(ValueError, match="from 1 to 8, got 0"):
        world.run(pid, size=0)


def test_environment_is_set_and_restored(world):
    first = world.run(environment, env={"EXTRA": "x", "LOCAL_RANK": None}, size=2)
    assert [one["RANK"] for one in first] == ["0", "1"]
    assert first[0]["WORLD_SIZE"] == first[0]["LOCAL_WORLD_SIZE"] == "2"
    assert first[0]["ACCELERATE_USE_CPU"] == "true"
    assert first[0]["EXTRA"] == "x"
    assert "LOCAL_RANK" not in first[0]
    second = world.run(environment, size=2)[1]
    assert "EXTRA" not in second
    assert second["LOCAL_RANK"] == "1"


def test_warnings_are_errors_as_in_the_test(world):
    with pytest.raises(WorldFailure, match="UserWarning: careful"):
        world.run(warn)


@pytest.mark.filterwarnings("ignore:careful")
def test_a_filter_of_the_test_holds_in_the_workers(world):
    world.run(warn)


def test_a_thread_left_in_a_worker_is_a_failure(world):
    with pytest.raises(WorldFailure, match="left threads"):
        world.run(leave_thread, size=1)


def test_an_exception_in_a_thread_is_a_failure(world):
    with pytest.raises(WorldFailure, match="Exception in thread"):
        world.run(raise_in_thread, size=1)


def test_output_is_shown_by_rank(world, capsys):
    world.run(speak)
    assert capsys.readouterr().out == "[rank 0] spoken by 0\n[rank 1] spoken by 1\n"


def test_a_warm_run_costs_tens_of_milliseconds(world, record_property):
    world.run(add_ranks, 0)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        world.run(add_ranks, 0)
        seconds.append(time.perf_counter() - begin)
    median = sorted(seconds)[10]
    print(f"median {median * 1000:.1f} ms")
    assert median < 0.5  # ten times what an idle machine shows: catches seconds, not noise


def is_on_path(folder):
    return folder in sys.path


def test_a_script_is_run_by_every_rank_with_its_arguments(world, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(__name__, os.environ['RANK'], sys.argv[1:])\n")

    assert world.run(run_program, str(script), "--x", "1", init=False) == [
        f"__main__ {rank} ['--x', '1']\n" for rank in range(2)
    ]
    for code in ("", "0"):
        script.write_text(f"import sys\nprint(sys.path[0])\nsys.exit({code})\n")
        assert world.run(run_program, str(script), init=False) == [f"{tmp_path.resolve()}\n"] * 2
    assert not any(world.run(is_on_path, str(tmp_path.resolve())))
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(WorldFailure, match="SystemExit: 3"):
        world.run(run_program, str(script), init=False)


def numbers() -> list[int]:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    modules = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0]
    modules[0] += 3  # as a model of four modules would
    Init.param_id += 2
    return [*modules, Init.param_id]


@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
def test_ranks_with_other_histories_agree_on_what_libraries_count(world):
    assert world.run(numbers, size=1, timeout_s=100) == [[3, 2]]
    assert world.run(numbers, size=2, timeout_s=100) == [[3, 2], [3, 2]]
