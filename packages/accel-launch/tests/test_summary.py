from __future__ import annotations

import signal
from pathlib import Path

import pytest

from accel_launch.summary import describe_end, failure_summary, signal_name


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (3, "exit code 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL; often the machine ran out of memory"),
    ],
)
def test_the_end_is_described(returncode: int, text: str) -> None:
    assert describe_end(returncode) == text


def test_signals_without_a_name() -> None:
    assert signal_name(40) == "signal 40"


def test_the_summary_says_who_how_where_and_what() -> None:
    text = failure_summary(
        1, "node7", 4, 3, 2, ["python", "a b.py"], b"Traceback\nValueError: boom\n", Path("logs/x")
    )

    assert text == (
        "accel launch: rank 1 of 4 on node7 failed (exit code 3); 2 others were stopped.\n"
        "  command: python 'a b.py'\n"
        "  logs: logs/x\n"
        "The end of its stderr:\n"
        "Traceback\nValueError: boom\n"
    )


def test_silence_is_said() -> None:
    assert "It wrote nothing to stderr." in failure_summary(0, "node7", 1, 1, 0, ["x"], b"", None)
