from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.collectives.operations import broadcast, copy_tensor_to_devices, gather, reduce
from accel_ops.collectives.padding import pad_across_processes
from accel_ops.debug import check_collectives, monitor, store
from accel_ops.debug.check_collectives import DistributedOperationException
from accel_state.accelerator_state import AcceleratorState
from accel_state.logging.loggers import get_logger
from accel_state.process.info import ProcessInfo
from accel_state.process.state import PartialState, current_process, wait_for_everyone
from accel_world.ports import lease_port

SECONDS = 4.0  # within which every process must have raised


# What the workers run


def debugging() -> ProcessInfo:
    return dataclasses.replace(current_process(), debug=True)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the message of the error that must come, and come soon."""
    start = time.monotonic()
    with pytest.raises(DistributedOperationException) as caught:
        function(*args, **kwargs)
    assert time.monotonic() - start < SECONDS
    return str(caught.value)


def disagree(kind: str) -> str:
    """The last process does something else than the others."""
    process = debugging()
    odd = process.rank == process.world_size - 1
    ones = torch.ones(2, 3)
    gather(ones, process=process)
    if kind == "shape":
        return attempt(gather, torch.ones(3, 3) if odd else ones, process=process)
    if kind == "dtype":
        return attempt(gather, {"a": [ones.int() if odd else ones]}, process=process)
    if kind == "key":
        return attempt(gather, {"b" if odd else "a": ones}, process=process)
    if kind == "order":
        tree = {"a": ones, "b": ones}
        return attempt(gather, dict(reversed(tree.items())) if odd else tree, process=process)
    if kind == "container":
        return attempt(gather, (ones,) if odd else [ones], process=process)
    if kind == "count":
        return attempt(gather, [ones] * (2 if odd else 1), process=process)
    if kind == "operation":
        return attempt(reduce if odd else gather, ones, process=process)
    if kind == "reduction":
        return attempt(reduce, ones, "sum" if odd else "mean", process=process)
    if kind == "source":
        return attempt(broadcast, ones, 1 if odd else 0, process=process)
    if kind == "objects":
        return attempt(broadcast_object_list, [1] * (2 if odd else 1), process=process)
    if kind == "object":
        return attempt(gather_object if odd else gather, ones, process=process)
    if kind == "pad":
        return attempt(pad_across_processes, ones, 1 if odd else 0, process=process)
    if kind == "wait":
        if odd:
            return attempt(check_collectives.check, "wait_for_everyone", process=process)
        return attempt(gather, ones, process=process)
    assert kind == "line"
    if odd:
        return attempt(lambda: gather(ones, process=process))
    return attempt(lambda: gather(ones, process=process))


def agree() -> list[Any]:
    """All operations, in debug mode, with what may differ between processes."""
    process = debugging()
    rank = process.rank
    return [
        gather({"a": torch.full((1,), rank)}, process=process)["a"].tolist(),
        reduce(torch.tensor(rank), "sum", process=process).item(),
        broadcast(torch.tensor(rank), 1, process=process).item(),
        copy_tensor_to_devices(torch.tensor(5) if rank == 1 else None, process=process).item(),
        pad_across_processes(torch.ones(rank + 1), process=process).shape[0],
        gather_object([rank] * rank, process=process),
        broadcast_object_list([rank], 1, process=process),
    ]


def one_more(how: str) -> str:
    """The last process calls one operation more than the others, who leave."""
    process = debugging()
    gather(torch.ones(1), process=process)
    if process.rank == process.world_size - 1:
        time.sleep(0.3)
        return attempt(reduce, torch.ones(1), process=process)
    if how == "leave":
        check_collectives.leave("it has seen enough")
    elif how == "destroy":
        dist.destroy_process_group()
    return ""


def waits_of_the_state() -> str:
    """Waits are compared however they are requested; the last process gathers instead."""
    state = PartialState()
    logger = get_logger("accel.test")
    logger.warning("all agree", in_order=True)
    with state.main_process_first():
        pass
    wait_for_everyone()
    if state.is_last_process:
        return attempt(gather, torch.ones(1))
    return attempt(state.wait_for_everyone)


def set_on_a_state() -> str:
    state = AcceleratorState(cpu=True)
    state.debug = True
    assert PartialState().debug
    message = attempt(gather, torch.ones(1 + state.process_index))
    PartialState().debug = False
    assert not state.debug
    with mock.patch.object(check_collectives, "check", side_effect=AssertionError("checked")):
        gather(torch.ones(1))
    return message


def left_before_the_first() -> str:
    """The last process comes to no operation at all."""
    state = PartialState()
    if state.is_last_process:
        check_collectives.leave("it has nothing to do")
        return ""
    return attempt(gather, torch.ones(1))


def left_while_waiting() -> str:
    """The last process leaves while the others wait for it already."""
    process = debugging()
    gather(torch.ones(1), process=process)
    if process.rank == process.world_size - 1:
        time.sleep(0.5)
        check_collectives.leave("of ValueError: nothing to gather")
        return ""
    return attempt(gather, torch.ones(1), process=process)


def come_back() -> list[float]:
    process = debugging()
    gather(torch.ones(1), process=process)
    if process.rank == 0:
        check_collectives.leave("it pauses")
    else:
        time.sleep(0.5)
    gather(torch.ones(1), process=process)
    if process.rank == 0:
        time.sleep(0.3)  # it is waited for again
    return gather(torch.ones(1), process=process).tolist()


def slow_function() -> None:
    time.sleep(2)


def stuck(monkeypatched: float) -> list[str]:
    """Process 1 is busy elsewhere; the others say where, once, and continue waiting."""
    process = debugging()
    with (
        mock.patch.object(store, "WARN_AFTER_S", monkeypatched),
        mock.patch.object(monitor, "_QUIET_S", 0.0),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        gather(torch.ones(1), process=process)
        if process.rank == 1:
            slow_function()
        gather(torch.ones(1), process=process)
    return [f"{warning.category.__name__}: {warning.message}" for warning in seen]


def never_comes() -> str:
    """Process 1 does not come before the process group's timeout."""
    process = debugging()
    store.default_store().set_timeout(timedelta(seconds=1))  # type: ignore[union-attr]
    with mock.patch.object(monitor, "_QUIET_S", 0.0):
        gather(torch.ones(1), process=process)
        if process.rank == 1:
            slow_function()
            return ""
        return attempt(gather, torch.ones(1), process=process)


def from_two_lines() -> list[str]:
    process = debugging()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            if process.is_main:
                broadcast(torch.ones(1), process=process)
            else:
                broadcast(torch.zeros(1), process=process)
    return [str(warning.message) for warning in seen]


def keys_after(operations: int) -> int:
    process = debugging()
    for _ in range(operations):
        gather(torch.ones(1), process=process)
    dist.barrier()
    count = int(store.default_store().num_keys())  # type: ignore[union-attr]
    dist.barrier()
    return count


def without_debug_mode() -> None:
    before = store._session
    with mock.patch.object(check_collectives, "check", side_effect=AssertionError("checked")):
        process = current_process()
        assert not process.debug
        gather(torch.ones(1))
        reduce(torch.ones(1))
        broadcast(torch.ones(1))
        gather_object(1)
        broadcast_object_list([1])
        pad_across_processes(torch.ones(1))
        copy_tensor_to_devices(torch.ones(1) if process.is_main else None)
    assert store._session in (before, None)  # one of an earlier test may be on its way out


# Disagreement


DIFFERENCES = {
    "shape": "tensors",
    "dtype": "tensors",
    "key": "tensors",
    "order": "tensors",
    "container": "tensors",
    "count": "tensors",
    "operation": "operation",
    "reduction": "arguments",
    "source": "arguments",
    "objects": "arguments",
    "object": "operation",
    "pad": "arguments",
    "wait": "operation",
    "line": "line of code",
}


@pytest.mark.parametrize("kind", DIFFERENCES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_process_says_how_they_disagree(world: Any, kind: str, size: int) -> None:
    messages = world.run(disagree, kind, size=size)

    assert len(set(messages)) == 1  # the same account everywhere
    first, *rows = messages[0].splitlines()
    assert first.startswith("Operation 2 is not the same on all processes: they differ in ")
    assert DIFFERENCES[kind] in first
    for rank in range(size):
        (row,) = [row for row in rows if row.startswith(f"  process {rank}: ")]
        assert f"{Path(__file__).name}:" in row
        assert " in attempt" in row or " in <lambda>" in row or " in disagree" in row


def test_the_account_shows_each_operation_and_what_differs(world: Any) -> None:
    message = world.run(disagree, "dtype", size=3)[0]

    assert "  process 0: gather at " in message
    assert "    data['a'][0]: float32 (2, 3)" in message
    assert "    data['a'][0]: int32 (2, 3)" in message
    assert "(2 tensors or containers are the same on all)" in message

    message = world.run(disagree, "reduction")[0]

    assert "  process 0: reduce(reduction='mean', scale=1.0) at " in message
    assert "  process 1: reduce(reduction='sum', scale=1.0) at " in message
    assert "    data: float32 (2, 3)" in message

    message = world.run(disagree, "order")[0]

    order = [line.strip() for line in message.splitlines() if line.startswith("    data[")]
    assert order == [f"data['{key}']: float32 (2, 3)" for key in "abba"]
    assert "(1 tensors or containers are the same on all)" in message


@pytest.mark.parametrize("size", [2, 3])
def test_waits_of_the_state_are_compared_too(world: Any, size: int) -> None:
    environment = {"ACCELERATE_DEBUG_MODE": "true"}
    messages = world.run(waits_of_the_state, size=size, env=environment)

    assert len(set(messages)) == 1
    # In order of rank each process waits `size` times; then two more waits; this one differs.
    assert f"Operation {size + 3} is not the same on all processes" in messages[0]
    assert "  process 0: wait_for_everyone at " in messages[0]
    assert f"  process {size - 1}: gather at " in messages[0]


def test_debug_mode_can_be_set(world: Any) -> None:
    for message in world.run(set_on_a_state, init=False):
        assert "they differ in tensors" in message


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_agree_get_their_results(world: Any, size: int) -> None:
    ranks = list(range(size))
    objects = [rank for rank in ranks for _ in range(rank)]

    assert world.run(agree, size=size) == [[ranks, sum(ranks), 1, 5, size, objects, [1]]] * size


def test_a_broadcast_may_be_called_from_two_lines_and_says_so_once(world: Any) -> None:
    (message,), none = world.run(from_two_lines)
    assert "they differ in line of code" in message
    assert none == []


# Absence


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("how", "reason"),
    [("leave", "it has seen enough"), ("destroy", "its process group was destroyed")],
)
def test_one_more_call_names_those_who_left(world: Any, size: int, how: str, reason: str) -> None:
    message = world.run(one_more, how, size=size)[-1]

    assert f"Process {size - 1} waits in operation 2 (reduce at " in message
    assert f"  process 0 left after operation 1 (gather at {__file__}:" in message
    assert f"because {reason}" in message


@pytest.mark.parametrize("size", [2, 3])
def test_who_leaves_before_the_first_operation_is_named(world: Any, size: int) -> None:
    environment = {"ACCELERATE_DEBUG_MODE": "true"}
    for message in world.run(left_before_the_first, size=size, env=environment)[:-1]:
        assert "waits in operation 1 (gather at " in message
        assert f"  process {size - 1} left before any operation, because it has nothing to do" in message


@pytest.mark.parametrize("size", [2, 3])
def test_who_leaves_is_not_waited_for(world: Any, size: int) -> None:
    for message in world.run(left_while_waiting, size=size)[:-1]:
        assert f"  process {size - 1} left after operation 1 (gather at " in message
        assert "because of ValueError: nothing to gather" in message


def test_a_process_may_come_back(world: Any) -> None:
    assert world.run(come_back) == [[1.0, 1.0]] * 2


def test_a_missing_process_says_where_it_is(world: Any) -> None:
    results = world.run(stuck, 0.5, size=3)

    assert results[1] == []
    for rank in (0, 2):
        (message,) = results[rank]  # one warning, then it comes
        assert message.startswith(f"RuntimeWarning: Process {rank} has waited ")
        assert "s in operation 2 (gather at " in message
        assert f"  process 1 is at {__file__}:" in message
        assert " in slow_function" in message


def test_a_process_that_never_comes_is_waited_for_until_the_timeout(world: Any) -> None:
    message = world.run(never_comes)[0]

    assert "Process 0 has waited 1 s in operation 2 (gather at " in message
    assert "which is the timeout of the process group" in message
    assert f"  process 1 is at {__file__}:" in message


# Cost


def test_the_store_does_not_grow(world: Any) -> None:
    few, many = (world.run(keys_after, n)[0] for n in (3, 60))

    assert few == many


def test_without_debug_mode_nothing_is_checked(world: Any) -> None:
    world.run(without_debug_mode)


def test_one_process_has_nobody_to_compare_with() -> None:
    check_collectives.check("gather", torch.ones(1), process=debugging())

    assert store._session is None


# Whole processes

SCENARIOS = {
    "ends 0": (2, "if rank != 0:\n    meet()"),
    "ends 1": (2, "if rank != 1:\n    meet()"),
    "fails 0": (2, "if rank == 0:\n    time.sleep(0.3)\n    raise ValueError('bad sample')\nmeet()"),
    "fails 1": (2, "if rank == 1:\n    time.sleep(0.3)\n    raise ValueError('bad sample')\nmeet()"),
    "worker ends 1": (2, "if rank != 1:\n    meet()"),
    "worker exits 1": (
        2,
        # As torch's launchers answer an exception.
        (
            "if rank == 1:\n    try:\n        raise ValueError('bad sample')\n"
            "    except ValueError:\n        sys.exit(1)\nmeet()"
        ),
    ),
    "leaves 1": (3, "if rank == 1:\n    os._exit(0)\nmeet()"),
    "killed 1": (2, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nmeet()"),
    "worker leaves 1": (2, "if rank == 1:\n    os._exit(0)\nmeet()"),
    "killed 0": (2, "if rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.5)\nmeet()"),
    "disagree": (
        3,
        # Process 0 is the first to see it, and ends at once.
        (
            "if rank:\n    store._PAUSES_S = (0.3, 0.3)\n"
            "try:\n    meet(rank + 1)\n"
            "except Exception as error:\n"
            "    print(f'{type(error).__name__}: {error}', file=sys.stderr, flush=True)\n    os._exit(1)"
        ),
    ),
}

# Imports torch once and forks the processes of all scenarios, which then end as any script does, or as a
# function does that a launcher runs in a process of multiprocessing.
SCRIPT = """
import dataclasses, multiprocessing, os, signal, sys, time
import torch
from accel_ops.debug import store
from accel_ops.collectives.operations import gather
from accel_state.process.state import PartialState

scenarios, folder = eval(sys.argv[1]), sys.argv[2]
children = []
for name, (size, body, port) in scenarios.items():
    for rank in range(size):
        child = os.fork()
        if child:
            children.append((f"{name} {rank}", child))
            continue
        errors = os.open(f"{folder}/{name} {rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT=str(port))

        def main():
            process = dataclasses.replace(PartialState().process, debug=True)

            def meet(n=1):
                gather(torch.ones(n), process=process)

            meet()
            start = time.monotonic()
            try:
                exec(body)
            finally:
                print(time.monotonic() - start, "s", file=sys.stderr)

        if name.startswith("worker"):
            worker = multiprocessing.get_context("fork").Process(target=main)
            worker.start()
            worker.join()
            sys.exit(worker.exitcode)
        main()
        sys.exit()
codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children}
print(codes)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """For each process of each scenario: its exit code and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("ended")
    with contextlib.ExitStack() as ports:
        scenarios = {
            name: (size, body, ports.enter_context(lease_port())) for name, (size, body) in SCENARIOS.items()
        }
        environment = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SCRIPT, repr(scenarios), str(folder)]
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes: dict[str, int] = ast.literal_eval(output.decode())
    return {name: (code, (folder / name).read_text()) for name, code in codes.items()}


def message_of(errors: str) -> str:
    """The error at the end of a traceback."""
    return errors[errors.rindex("DistributedOperationException") :]


@pytest.mark.parametrize(("how", "leaver"), [("ends", 0), ("ends", 1), ("worker ends", 1)])
def test_a_script_that_ends_early_is_named(ended: dict[str, tuple[int, str]], how: str, leaver: int) -> None:
    assert ended[f"{how} {leaver} {leaver}"][0] == 0
    code, errors = ended[f"{how} {leaver} {1 - leaver}"]
    assert code == 1
    assert f"process {leaver} left after operation 1 (gather at <string>:24 in meet)" in message_of(errors)
    assert "because its script ended" in message_of(errors)


@pytest.mark.parametrize(("how", "leaver"), [("fails", 0), ("fails", 1), ("worker exits", 1)])
def test_a_script_that_fails_is_named_with_its_error(
    ended: dict[str, tuple[int, str]], how: str, leaver: int
) -> None:
    assert ended[f"{how} {leaver} {leaver}"][0] == 1
    code, errors = ended[f"{how} {leaver} {1 - leaver}"]
    assert code == 1
    assert f"process {leaver} left after operation 1 (gather at <string>:24 in meet)" in message_of(errors)
    assert "because of ValueError: bad sample" in message_of(errors)


def test_the_end_of_the_process_with_the_store_is_named(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["killed 0 0"][0] == -signal.SIGKILL
    code, errors = ended["killed 0 1"]
    assert code == 1
    assert "Process 1, in operation 2 (gather at " in message_of(errors)
    assert "lost the store of the process group" in message_of(errors)
    assert "usually process 0, has ended" in message_of(errors)


@pytest.mark.parametrize("other", ["leaves 1 0", "leaves 1 2", "killed 1 0", "worker leaves 1 0"])
def test_a_process_that_ends_without_a_word_is_noticed(ended: dict[str, tuple[int, str]], other: str) -> None:
    code, errors = ended[other]
    assert code == 1
    assert "process 1 ended without an exception: by os._exit or a signal" in message_of(errors)
    assert float(errors[: errors.index(" s\n")]) < 15  # of the 30 minutes that a process group has


def test_disagreement_reaches_all_although_the_store_ends_with_process_0(
    ended: dict[str, tuple[int, str]],
) -> None:
    for rank in range(3):
        code, errors = ended[f"disagree {rank}"]
        assert code == 1
        assert "Operation 2 is not the same on all processes" in message_of(errors)
