from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from accel_launch.local.failures.summary import Failure, Report, describe_end, failure_summary, first_failure

BOOM = 'Traceback (most recent call last):\n  File "s.py", line 1, in <module>\n    f()\nValueError: boom\n'
GONE = BOOM.replace("ValueError: boom", "RuntimeError: [pair.cc:5] Connection closed by peer [::1]:2")
WATCHDOG = "terminate called\n  what(): [Rank 0] Watchdog caught collective operation timeout: WorkNCCL\n"


def failure(rank: int, at: float = 0, stderr_tail: str = BOOM, returncode: int = 1, **others: Any) -> Failure:
    return Failure(rank, "node7", returncode, at, stderr_tail, **others)


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (3, "exit code 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL, which the system sends when memory runs out"),
    ],
)
def test_the_end_is_described(returncode: int, text: str) -> None:
    assert describe_end(returncode) == text


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 2), failure(1, 1)], 1),
        ([failure(0, 1, GONE), failure(1, 2)], 1),
        ([failure(0, 2, GONE), failure(1, 1, GONE)], 1),
        ([failure(0, 1), failure(1, 2, "", -signal.SIGKILL)], 1),
        ([failure(0, 1, GONE, -signal.SIGKILL, stopped=True), failure(1, 2)], 1),
        ([failure(0, 1, WATCHDOG, -signal.SIGABRT), failure(1, 2)], 1),
        ([failure(0, 2, GONE), failure(1, 1, "saved\n", 75, terminated=True)], 0),
        ([failure(0, 2), failure(1, 1, "", -signal.SIGABRT, terminated=True)], 0),
        ([failure(0, 2), failure(1, 1, terminated=True)], 1),
        ([failure(0, 2, GONE), failure(1, 1, "", 3)], 1),
        ([failure(0, 1, BOOM + "[rank0]:[W1122 store] failed to recv\n"), failure(1, 2, GONE)], 0),
    ],
)
def test_the_first_failure_is_the_cause(failures: list[Failure], rank: int) -> None:
    assert first_failure(failures).rank == rank


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        (failure(0, returncode=3), 3),
        (failure(0, returncode=-9), 137),
        (failure(0, returncode=-15, stopped=True), 1),
    ],
)
def test_the_exit_code_is_that_of_the_failure(failed: Failure, code: int) -> None:
    assert failed.exit_code == code


def test_the_summary_says_who_how_where_and_what_once() -> None:
    report = Report("accel launch", 4, 2, ["python", "a b.py"], Path("logs/x"))
    text = failure_summary([failure(0, 2, GONE), failure(1, 1, returncode=3)], report)

    assert text == (
        "accel launch: rank 1 of 4 on node7 failed (exit code 3); 2 others were stopped.\n"
        "  command: python 'a b.py'\n"
        "  logs: logs/x\n"
        f"The end of its stderr:\n{BOOM}"
        "  then rank 0 lost its connection (exit code 1): RuntimeError: [pair.cc:5] Connection closed by "
        "peer [::1]:2\n"
    )


def test_a_traceback_that_was_shown_is_not_repeated() -> None:
    text = failure_summary([failure(0, shown=True)], Report("accel launch", 1))

    assert text.endswith("Its traceback is shown above: ValueError: boom\n")
    assert "Traceback (" not in text


def test_words_without_a_traceback_are_repeated_as_other_workers_may_have_written_since() -> None:
    text = failure_summary([failure(0, stderr_tail="no data\n", shown=True)], Report("accel launch", 1))

    assert text.endswith("The end of its stderr:\nno data\n")


def test_silence_is_said() -> None:
    text = failure_summary(
        [failure(0, stderr_tail=""), failure(1, 1, stderr_tail="")], Report("accel launch", 2)
    )

    assert text.endswith(
        "It wrote nothing to stderr.\n  then rank 1 (exit code 1): it wrote nothing to stderr\n"
    )


def test_many_others_take_few_lines() -> None:
    text = failure_summary([failure(rank, rank, GONE) for rank in range(64)], Report("accel launch", 64))

    assert text.count("  then rank ") == 8
    assert "  then 55 more\n" in text


@pytest.mark.parametrize(
    "stderr_tail",
    [
        "  what(): [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 6 vs 4.\n",
        WATCHDOG,
        BOOM.replace("boom", "Timed out waiting 1800000ms for recv operation to complete"),
    ],
)
def test_a_collective_that_does_not_fit_suggests_debug_mode(stderr_tail: str) -> None:
    text = failure_summary([failure(0, stderr_tail=stderr_tail)], Report("accel launch", 2))

    assert "accel launch --debug" in text.splitlines()[-1]
    assert "--debug" not in failure_summary(
        [failure(0, stderr_tail=stderr_tail)], Report("accel launch", 2, debug=True)
    )
    assert "--debug" not in failure_summary([failure(0)], Report("accel launch", 2))


def test_colour_marks_the_title_and_the_exception() -> None:
    text = failure_summary([failure(0)], Report("accel launch", 1, colour=True))

    assert text.startswith("\x1b[31maccel launch: rank 0 of 1 on node7 failed (exit code 1).\x1b[0m\n")
    assert text.endswith("\x1b[1mValueError: boom\x1b[0m\n")
