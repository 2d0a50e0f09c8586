from __future__ import annotations

import os
import signal
import threading

import pytest

from accel_launch.errors import LaunchError
from accel_launch.local.signals import SignalPipe, ended_by_sigterm, signal_name


def test_signals_have_names_and_some_none() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


def test_signals_can_be_read_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalPipe() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert sorted(signals.read()) == [signal.SIGUSR1, signal.SIGTERM]
        assert signals.read() == []

    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalPipe() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.read() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_ends_with_a_line_and_the_handler_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:  # as Ray does
            raise SystemExit(1) from None

    with pytest.raises(SystemExit) as ended, ended_by_sigterm():
        wait()

    assert ended.value.code == 143
    assert capfd.readouterr().err == "accel launch: SIGTERM: ended, as no worker runs.\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_late_wake_reaches_no_other_file() -> None:
    with SignalPipe() as signals:
        pass
    reading, writing = os.pipe()  # takes the numbers that have become free
    os.set_blocking(reading, False)
    try:
        signals.wake()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def test_another_thread_is_rejected() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            with SignalPipe():
                pass
        except LaunchError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    with pytest.raises(LaunchError, match="main thread"):
        raise errors[0]
