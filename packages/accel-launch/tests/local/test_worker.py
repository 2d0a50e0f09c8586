from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from accel_launch.local.worker import Worker, adopt_orphans


def wait(worker: Worker, timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not worker.gone:
        assert time.monotonic() < until
        worker.reap()
        time.sleep(0.005)


def test_it_leads_its_own_session_and_is_reaped() -> None:
    reading, writing = os.pipe()
    code = "import os; print(os.getpid() == os.getsid(0) == os.getpgid(0), os.environ['X'])"
    worker = Worker(0, [sys.executable, "-c", code], {"X": "7"}, stdout=writing)
    os.close(writing)
    wait(worker)

    assert os.read(reading, 100) == b"True 7\n"
    assert (worker.returncode, worker.running, worker.gone) == (0, False, True)
    os.close(reading)


def test_signals_reach_the_worker() -> None:
    worker = Worker(0, ["sleep", "60"], {"PATH": os.environ["PATH"]})
    worker.signal(signal.SIGUSR1)
    wait(worker)

    assert worker.returncode == -signal.SIGUSR1
    worker.signal(signal.SIGUSR1)  # nothing to send to any more
    worker.signal_group(signal.SIGUSR1)


def test_it_heeds_a_signal_that_this_process_ignores() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker(0, ["sleep", "3"], {"PATH": os.environ["PATH"]}, heed=[signal.SIGINT])
    finally:
        signal.signal(signal.SIGINT, before)
    worker.signal(signal.SIGINT)
    wait(worker)

    assert worker.returncode == -signal.SIGINT


def test_the_group_is_gone_only_when_its_children_are() -> None:
    reading, writing = os.pipe()
    adopt_orphans(True)
    try:
        worker = Worker(
            0, ["sh", "-c", "sleep 60 & echo started"], {"PATH": os.environ["PATH"]}, stdout=writing
        )
        os.close(writing)
        os.read(reading, 100)
        until = time.monotonic() + 5
        while worker.running and time.monotonic() < until:
            worker.reap()
        assert (worker.returncode, worker.gone) == (0, False)

        worker.signal_group(signal.SIGTERM)
        wait(worker)
        assert select.select([reading], [], [], 5)[0]
        assert os.read(reading, 1) == b""  # the sleeper, too, has let go of the pipe
    finally:
        adopt_orphans(False)
        os.close(reading)


def test_kill_by_keeps_the_earliest_time() -> None:
    worker = Worker(0, ["sleep", "60"], {"PATH": os.environ["PATH"]})
    worker.kill_by(50.0)
    worker.kill_by(70.0)
    assert worker.kill_at == 50.0
    worker.kill(80.0)
    worker.kill_by(60.0)
    assert (worker.kill_at, worker.killed) == (80.0, True)
    wait(worker)

    assert worker.returncode == -signal.SIGKILL


def test_end_kills_and_waits() -> None:
    worker = Worker(0, ["sleep", "60"], {"PATH": os.environ["PATH"]})
    worker.end()

    assert worker.returncode == -signal.SIGKILL


def test_the_kernel_ends_a_worker_whose_parent_is_killed() -> None:
    code = (
        "import os, time\nfrom accel_launch.local.worker import Worker\n"
        "worker = Worker(0, ['sleep', '60'], {'PATH': os.environ['PATH']})\n"
        "print(worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    ended = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    assert select.select([ended], [], [], 5)[0]
    os.close(ended)
