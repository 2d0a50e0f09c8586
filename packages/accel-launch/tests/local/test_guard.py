from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

from accel_launch.local.guard import Guard


def children() -> set[str]:
    listings = Path("/proc/self/task").glob("*/children")
    return {pid for listing in listings for pid in listing.read_text().split()}


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def test_closing_kills_the_groups_that_were_not_removed(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    guard.add(sleeper.pid)
    guard.close()

    assert sleeper.wait(5) == -9


def test_a_detached_one_is_no_child_and_kills_too(sleeper: subprocess.Popen[bytes]) -> None:
    before = children()
    guard = Guard(detached=True)
    after = children()
    guard.add(sleeper.pid)
    guard.close()

    assert after == before
    assert sleeper.wait(5) == -9


def test_groups_that_were_removed_are_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    guard.add(sleeper.pid)
    guard.remove(sleeper.pid)
    guard.close()

    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def assert_its_copy_is_closed(reading: int) -> None:
    until = time.monotonic() + 5
    os.set_blocking(reading, False)
    while True:  # the end shows as soon as the guard has closed its copy
        try:
            assert os.read(reading, 1) == b""
            break
        except BlockingIOError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_it_holds_none_of_our_files() -> None:
    reading, writing = os.pipe()
    guard = Guard()
    try:
        os.close(writing)
        assert_its_copy_is_closed(reading)
    finally:
        guard.close()
        os.close(reading)


def test_what_is_open_counts_and_not_the_limit_of_open_files() -> None:
    reading, writing = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, soft - 1)
    os.close(writing)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        guard = Guard()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        os.close(high)
        assert_its_copy_is_closed(reading)
    finally:
        guard.close()
        os.close(reading)


def test_a_guard_that_was_killed_is_no_error(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    os.kill(guard._pid, 9)
    os.waitpid(guard._pid, 0)

    guard.add(sleeper.pid)
    guard.close()

    sleeper.kill()
    sleeper.wait()
