"""Runs that go wrong, as users see them: who failed, where, with what exit code, and nothing left waiting."""

from __future__ import annotations

import re
import time

import pytest

# Torch starts in every process, and the machine may be busy.
pytestmark = pytest.mark.timeout(300)

PREAMBLE = """
import time
import torch
from accel import Accelerator

accelerator = Accelerator()
accelerator.wait_for_everyone()
"""

TRAINING = (
    PREAMBLE
    + """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)


def step():
    accelerator.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()


accelerator.wait_for_everyone()
"""
)

# Prints when it fails, so that the test measures from the failure and not from the start of torch.
ONE_RAISES = (
    TRAINING
    + """
for i in range(100):
    if accelerator.process_index == 1 and i == 3:
        print(f"failing at {time.time()}", flush=True)
        raise RuntimeError("planted in step 3")
    step()
"""
)

ONE_IS_KILLED = (
    TRAINING
    + """
import os, signal
if accelerator.process_index == 1:
    print(f"failing at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
step()
time.sleep(60)
"""
)

ONE_LEAVES_A_COLLECTIVE = (
    PREAMBLE
    + """
if accelerator.process_index == 1:
    raise ValueError("bad sample")
accelerator.wait_for_everyone()
"""
)

ONE_EXITS = PREAMBLE + "raise SystemExit(7) if accelerator.process_index == 1 else time.sleep(60)\n"


def seconds_after_failure(run, end: float) -> float:
    (line,) = [line for line in run.stdout.splitlines() if "failing at" in line]
    return end - float(line.rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def one_raises(launched):
    """Run it once for the tests that look at it; return the run and when it ended."""
    return launched(ONE_RAISES, launch_args=["--cpu"]), time.time()


def test_a_workers_exception_ends_all_within_ten_seconds(one_raises):
    run, end = one_raises

    assert seconds_after_failure(run, end) < 10
    assert run.returncode == 1
    assert "RuntimeError: planted in step 3" in run.stderr
    assert "rank 1" in run.stderr.lower()


def test_with_a_watchdog_the_others_say_who_has_left_and_why(launched):
    run = launched(ONE_LEAVES_A_COLLECTIVE, launch_args=["--cpu", "--watch", "--grace_period", "30"])

    assert run.returncode == 1
    report = run.stderr.partition("Watchdog, process 0 of 2: a collective failed here.\n")[2]
    told = r"^  process 1: left after operation .* because of ValueError: bad sample$"
    assert re.search(told, report, flags=re.MULTILINE)
    assert run.stderr.count("ValueError: bad sample") >= 2  # and in the summary


def test_a_killed_worker_ends_all_within_ten_seconds(launched):
    run = launched(ONE_IS_KILLED, launch_args=["--cpu"])

    assert seconds_after_failure(run, time.time()) < 10
    assert run.returncode == 128 + 9
    assert "SIGKILL" in run.stderr


def test_a_workers_exit_code_is_the_launchers(launched):
    assert launched(ONE_EXITS, launch_args=["--cpu"]).returncode == 7


def test_a_script_that_is_not_there_is_named_before_anything_starts(launched, tmp_path):
    run = launched(tmp_path / "nothing.py", launch_args=["--cpu"])

    assert run.returncode != 0
    assert "nothing.py" in run.stderr
    assert "Traceback" not in run.stderr


MISMATCH = (
    PREAMBLE
    + """
if accelerator.process_index == 0:
    accelerator.gather(torch.zeros(2))
else:
    accelerator.reduce(torch.zeros(3))
"""
)


UNEVEN = (
    PREAMBLE
    + """
accelerator.gather(torch.zeros(2 + accelerator.process_index))
accelerator.wait_for_everyone()
"""
)


def test_a_gather_that_does_not_fit_suggests_debug_mode(launched):
    run = launched(UNEVEN, launch_args=["--cpu"])

    assert run.returncode != 0
    assert "accel launch --debug" in run.stderr.rstrip().splitlines()[-1]


def test_one_exception_on_two_ranks_takes_one_traceback_and_a_line(one_raises):
    run, _ = one_raises
    summary = run.stderr[run.stderr.index("accel launch: ") :]

    assert "accel launch: rank 1 of 2" in summary
    assert run.stderr.count("Traceback (most recent call last):") == 1
    assert "RuntimeError: planted in step 3\n  then rank 0 lost its connection (" in summary
    assert len(summary.splitlines()) <= 12, summary


def test_debug_mode_of_the_launcher_names_every_processs_operation_and_place(launched):
    run = launched(MISMATCH, launch_args=["--cpu", "--debug"])

    assert run.returncode == 1
    for part in ("gather", "reduce", "(2,)", "(3,)", "process 0", "process 1"):
        assert part in run.stderr, run.stderr
    assert run.stderr.count(".py:") >= 2


ONE_MORE = (
    PREAMBLE
    + """
accelerator.gather(torch.zeros(2))
if accelerator.process_index == 0:
    accelerator.gather(torch.zeros(2))
print(f"failing at {time.time()}" if accelerator.process_index == 1 else "", flush=True)
"""
)


def test_debug_mode_ends_a_process_that_waits_for_one_that_has_left(launched):
    run = launched(ONE_MORE, launch_args=["--cpu", "--debug"])

    assert run.returncode == 1
    assert seconds_after_failure(run, time.time()) < 10
    assert "left" in run.stderr
