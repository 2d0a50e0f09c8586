"""The watchdog in real processes: each way to hang, and none."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives.operations import broadcast, gather, reduce
from accel_ops.collectives.pack import SMALL_BYTES
from accel_ops.debug import watchdog
from accel_ops.debug.progress import Sampler
from accel_ops.debug.watchdog import Watchdog
from accel_state.process.state import PartialState, current_process
from accel_world.ports import lease_port

LIMIT = 0.4

# In one pool of processes: what comes to an end by itself


def watched(function: Callable[..., None], *args: Any, limit: float, answer_s: float) -> str:
    """Run a function under a watchdog; return what that reports."""
    reports: list[str] = []

    class Noted(Watchdog):
        def _write(self, text: str) -> None:
            reports.append(text)

    with mock.patch.object(watchdog, "ANSWER_S", answer_s):
        dog = Noted(current_process(), limit)
        try:
            dist.barrier()
            function(*args)
        finally:
            dog.stop()
    assert not dog.is_running
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("accel-watchdog")}
    return "\n\n".join(reports)


def sleep_here(seconds: float) -> None:
    time.sleep(seconds)


# Not lambdas, whose lines would be the reported ones.
OPERATIONS: dict[str, Callable[[], Any]] = {
    "gather": partial(gather, torch.ones(1)),
    "gather of two shapes": partial(gather, [torch.ones(1), torch.ones(2)]),
    "gather of a large tensor": partial(gather, torch.ones(SMALL_BYTES)),
    "reduce of a large tensor": partial(reduce, torch.ones(SMALL_BYTES)),
    "broadcast of a large tensor": partial(broadcast, torch.ones(SMALL_BYTES), from_process=1),
}


def late(kind: str) -> None:
    rank = current_process().rank
    state, layer = PartialState(), torch.nn.Linear(2, 2)
    if kind == "backward":
        layer = torch.nn.parallel.DistributedDataParallel(layer)
        loss = layer(torch.ones(1, 2)).sum()
    if rank == 1:
        sleep_here(1.6)
    if kind in OPERATIONS:
        OPERATIONS[kind]()
    elif kind == "wait":
        state.wait_for_everyone()
    elif kind == "torch":
        dist.all_reduce(torch.ones(1))
    elif kind == "backward":
        loss.backward()
    else:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()


def late_in_subgroup() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    if current_process().rank == 2:
        sleep_here(1.6)
    if current_process().rank != 1:
        dist.all_reduce(torch.ones(1), group=groups[0])
    dist.barrier()


def busy() -> None:
    """Steps, and long work without any collective on both, which no other process waits for."""
    for _ in range(5):
        gather(torch.ones(1))
    sleep_here(2.2)
    gather(torch.ones(1))


def stopped() -> None:
    """Process 1 is stopped, until process 0 lets it continue."""
    pids = gather(torch.tensor(os.getpid()))
    if current_process().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        threading.Timer(2.5, os.kill, [int(pids[1]), signal.SIGCONT]).start()
    gather(torch.ones(1))


def scenario(kind: str, *args: Any, limit: float = LIMIT, answer_s: float = 20.0) -> str:
    return watched(globals()[kind], *args, limit=limit, answer_s=answer_s)


LATE = {
    "gather": "gather (all_gather)",
    "gather of two shapes": "gather (all_gather)",
    "gather of a large tensor": "gather (wait)",
    "reduce of a large tensor": "reduce (wait)",
    "broadcast of a large tensor": "broadcast (wait)",
    "wait": "wait_for_everyone (barrier)",
    "torch": "all_reduce",
    "backward": "backward",
    "async": "",
}


@pytest.mark.parametrize("kind", LATE)
def test_who_is_late_and_where_is_reported_once(world: Any, kind: str) -> None:
    (report,) = filter(None, world.run(scenario, "late", kind))

    headline, arrival, waiting, sleeping = report.splitlines()
    assert headline == "an operation has waited for longer than 0.4 s."
    assert ": arrived: 0; not arrived: 1" in arrival
    number = int(arrival.split()[1].rstrip(":"))
    name = f", {LATE[kind]}" if LATE[kind] else " at"
    assert waiting.startswith(f"  process 0: in operation {number}{name}")
    assert f" at {__file__}:" in waiting
    assert waiting.endswith(" in late")
    assert sleeping.startswith(f"  process 1: after operation {number - 1}, at {__file__}:")
    assert sleeping.endswith(" in sleep_here")


def test_operations_of_other_groups_are_seen(world: Any) -> None:
    (report,) = filter(None, world.run(scenario, "late_in_subgroup", size=3))

    assert "  Operation 1 of the group of processes 0, 2: arrived: 0; not arrived: 2\n" in report
    assert "arrived: 1; not arrived: 0, 2\n" in report  # which follows from it


def test_nothing_is_reported_when_nobody_waits(world: Any) -> None:
    assert world.run(scenario, "busy", limit=1.0) == ["", ""]


def test_a_stopped_process_is_said_not_to_answer(world: Any) -> None:
    report = world.run(scenario, "stopped", answer_s=1.0)[0]

    assert ": arrived: 0; without answer: 1\n" in report
    assert "  process 1: does not answer: it is stopped, hangs outside Python, was killed" in report


def breaks() -> tuple[list[str], bool]:
    """Run a watchdog that fails at its third look; returns what it wrote, and whether it runs at the end."""
    written: list[str] = []

    class Noted(Watchdog):
        def _write(self, text: str) -> None:
            written.append(text)

    take, looks = Sampler.take, iter(range(100))

    def fails(sampler: Sampler) -> Any:
        if next(looks) == 2:
            raise KeyError("planted")
        return take(sampler)

    with mock.patch.object(Sampler, "take", fails):
        dog = Noted(current_process(), LIMIT)
        until = time.monotonic() + 60
        while dog.is_running and time.monotonic() < until:
            time.sleep(0.02)
    gather(torch.ones(1))
    dog.stop()
    return written, dog.is_running


def test_a_watchdog_that_fails_says_so_once_and_training_continues(world: Any) -> None:
    for written, is_running in world.run(breaks):
        assert not is_running
        assert len(written) == 1
        assert written[0].startswith("stops because of an internal error, and training continues.")
        assert written[0].endswith("KeyError: 'planted'")


# One process


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_an_error(limit: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_s is {limit!r}; it takes a number of seconds above 0"):
        Watchdog(current_process(), limit)


def test_one_process_has_nobody_to_wait_for() -> None:
    before = threading.enumerate()
    dog = Watchdog(current_process(), 0.1)

    assert not dog.is_running
    assert threading.enumerate() == before
    dog.stop()


def test_several_processes_need_a_process_group() -> None:
    process = dataclasses.replace(current_process(), world_size=2)

    with pytest.raises(RuntimeError, match="has no process group: make the PartialState"):
        Watchdog(process, 1.0)


# Whole processes

SCENARIOS = {
    "sleeps": (2, "if rank == 1:\n    time.sleep(30)\nmeet()", True),
    "leaves": (2, "if rank != 1:\n    meet()", False),
    "raises 0": (2, "if rank == 0:\n    raise ValueError('bad sample')\nmeet()", False),
    "raises 1": (3, "if rank == 1:\n    raise ValueError('bad sample')\nmeet()", False),
    # Process 0 hosts the store.
    "stops 0": (2, "if rank == 0:\n    stop()\nmeet()", True),
    "stops 1": (3, "if rank == 1:\n    stop()\nmeet()", True),
    "main": (2, "if PartialState().is_main_process:\n    PartialState().wait_for_everyone()\nmeet()", True),
    "kept": (2, "if rank == 1:\n    keep()\n    raise ValueError('bad sample')\nmeet()", True),
    "well": (2, "time.sleep(0.3 * rank)\nfor _ in range(20):\n    meet()\ntime.sleep(0.8 * rank)", True),
}

# Imports torch once and forks the processes of all scenarios, which then end as any script does; but for that
# in which all is well they skip the interpreter's own end, which takes a second for each.
SCRIPT = """
import atexit, gc, os, signal, subprocess, sys, threading, time
import torch
from accel_ops.collectives.operations import gather
from accel_ops.debug import watchdog
from accel_state.process.state import PartialState

def stop():
    subprocess.Popen(["sh", "-c", f"sleep 17; kill -9 {os.getpid()}"])
    time.sleep(0.5)  # gloo's thread may still be sending what another process waits for
    os.kill(os.getpid(), signal.SIGSTOP)

def keep():
    threading.Thread(target=time.sleep, args=(90,)).start()

def meet():
    gather(torch.ones(1))

scenarios, folder = eval(sys.argv[1]), sys.argv[2]
gc.freeze()  # a collection of torch's objects in each child would copy them, for longer than the limits
children = []
for name, (size, body, abort, port) in scenarios.items():
    for rank in range(size):
        child = os.fork()
        if child:
            children.append((f"{name} {rank}", child))
            continue
        errors = os.open(f"{folder}/{name} {rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        if name != "well":  # called last
            atexit.register(lambda: os._exit(int(hasattr(sys, "last_value"))))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))
        # Patient on a busy machine: a process that gets no answer from the store in time reports as well.
        watchdog.ANSWER_S = 9 if name.startswith("stops") else 30
        watchdog._STORE_S = 1 if name == "stops 0" else 10
        watchdog.Watchdog(PartialState().process, 5.0 if name == "well" else 1.5, abort)
        # Else one that starts late is reported in place of what the scenario is about.
        open(f"{folder}/started {name} {rank}", "w").close()
        while not all(os.path.exists(f"{folder}/started {name} {other}") for other in range(size)):
            time.sleep(0.01)
        meet()
        exec(body)
        sys.exit()
codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children}
print(codes)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """For each process of each scenario: its exit code and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("ended")
    with contextlib.ExitStack() as ports:
        scenarios = {name: (*values, ports.enter_context(lease_port())) for name, values in SCENARIOS.items()}
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SCRIPT, repr(scenarios), str(folder)]
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes: dict[str, int] = ast.literal_eval(output.decode())
    return {name: (code, (folder / name).read_text()) for name, code in codes.items()}


def lines_of(errors: str) -> list[str]:
    """The last report that a process has printed."""
    # Its main thread may be printing its own error at that time, the end of whose last line comes by itself.
    errors = errors.replace("Watchdog, process ", "\nWatchdog, process ")
    lines = errors[errors.rindex("Watchdog, process ") :].splitlines()
    return [line for line in lines if line.startswith(("Watchdog", "  "))]


def report_of(ended: dict[str, tuple[int, str]], scenario: str) -> list[str]:
    """The lines of the only report of a scenario."""
    written = [errors for name, (_, errors) in ended.items() if name.rpartition(" ")[0] == scenario]
    (errors,) = [text for text in written if "Watchdog, process " in text]
    assert errors.count("Watchdog, process ") == 1
    return lines_of(errors)


def test_abort_ends_every_process_after_the_report(ended: dict[str, tuple[int, str]]) -> None:
    assert [ended[f"sleeps {rank}"][0] for rank in range(2)] == [1, 1]
    headline, arrival, waiting, sleeping, end = report_of(ended, "sleeps")
    assert headline.endswith(" of 2: an operation has waited for longer than 1.5 s.")
    assert arrival == "  Operation 2: arrived: 0; not arrived: 1"
    assert waiting.startswith("  process 0: in operation 2, gather (all_gather")
    assert waiting.endswith("at <string>:17 in meet")
    assert sleeping == "  process 1: after operation 1, at <string>:2 in <module>"
    assert end == "  Every process ends with exit code 1, because abort is on."


def test_who_leaves_early_is_named(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["leaves 1"] == (0, "")
    code, errors = ended["leaves 0"]

    assert code == 1
    assert lines_of(errors)[0] == "Watchdog, process 0 of 2: a collective failed here."
    assert "  process 1: left after operation 1, because its script ended" in lines_of(errors)


@pytest.mark.parametrize("failing", [0, 1])
def test_who_raises_is_named_with_its_error(ended: dict[str, tuple[int, str]], failing: int) -> None:
    code, errors = ended[f"raises {failing} {failing}"]
    assert code == 1
    assert "Watchdog" not in errors  # its own traceback says it all
    for rank in {0, 1, 2 * failing} - {failing}:
        assert ended[f"raises {failing} {rank}"][0] == 1
    assert (
        f"  process {failing}: left after operation 1 at <string>:2 in <module>, "
        "because of ValueError: bad sample"
    ) in report_of(ended, f"raises {failing}")


def test_a_collective_that_main_alone_calls_is_shown_next_to_that_of_the_others(
    ended: dict[str, tuple[int, str]],
) -> None:
    assert [ended[f"main {rank}"][0] for rank in range(2)] == [1, 1]
    _, arrival, main, other, _ = report_of(ended, "main")
    assert arrival == "  Operation 2: arrived: 0-1, but not in the same operation"
    assert main == "  process 0: in operation 2, wait_for_everyone (barrier), at <string>:2 in <module>"
    assert other.startswith("  process 1: in operation 2, gather (all_gather")


def test_who_raised_and_is_kept_by_a_thread_is_named(ended: dict[str, tuple[int, str]]) -> None:
    assert [ended[f"kept {rank}"][0] for rank in range(2)] == [1, 1]
    lines = report_of(ended, "kept")
    assert "  Operation 2: arrived: 0; not arrived: 1" in lines
    assert (
        "  process 1: after operation 1, at the end of its script, because of ValueError: bad sample"
    ) in lines


def test_a_stopped_process_does_not_keep_the_others(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["stops 1 1"][0] == -signal.SIGKILL
    assert [ended[f"stops 1 {rank}"][0] for rank in (0, 2)] == [1, 1]
    lines = report_of(ended, "stops 1")
    assert "  Operation 2: arrived: 0, 2; without answer: 1" in lines
    assert any(line.startswith("  process 1: does not answer: it is stopped") for line in lines)


def test_where_the_host_of_the_store_is_stopped_others_say_what_they_know(
    ended: dict[str, tuple[int, str]],
) -> None:
    code, errors = ended["stops 0 1"]

    assert code == 1
    lines = lines_of(errors)
    assert lines[1] == "  Operation 2: arrived: 1; unknown: 0"
    assert lines[2] == "  process 0: unknown"
    assert lines[3].startswith("  process 1: in operation 2, gather (all_gather")
    assert "the store of the process group does not reply (no answer in time)" in errors


def test_nothing_is_printed_when_all_is_well(ended: dict[str, tuple[int, str]]) -> None:
    for rank in range(2):
        code, errors = ended[f"well {rank}"]
        assert code == 0
        # Torch warns of names of hosts that it cannot look up in time.
        assert [line for line in errors.splitlines() if not line.startswith("[W")] == []


def test_a_fork_does_not_speak_for_its_parent(world: Any) -> None:
    world.run(forks)


def forks() -> None:
    dog = Watchdog(current_process(), 5.0)
    child = os.fork()
    if child == 0:
        was_running = dog.is_running
        dog.stop()
        os._exit(int(was_running))
    assert os.waitpid(child, 0)[1] == 0
    assert dog.is_running
    dog.stop()
