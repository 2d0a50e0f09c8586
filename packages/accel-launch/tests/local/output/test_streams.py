from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_launch.local.output.console import Console
from accel_launch.local.output.log_file import Log
from accel_launch.local.output.streams import Stream, open_capture

TRACEBACK = b'Traceback (most recent call last):\n  File "x", line 1\nValueError: boom\n'


class Pipes:
    """A stream under test: `send` writes as the worker, `shown` is what the console got."""

    def __init__(self, **options: Any) -> None:
        self._shown, console = os.pipe()
        os.set_blocking(self._shown, False)
        reading, self._worker = os.pipe()
        os.set_blocking(reading, False)
        self._console = console
        self.stream = Stream(reading, Console(console), **options)

    def send(self, data: bytes, now: float = 0.0) -> None:
        os.write(self._worker, data)
        self.stream.read(now)

    def shown(self) -> bytes:
        try:
            return os.read(self._shown, 1 << 20)
        except BlockingIOError:
            return b""

    def end(self) -> None:
        os.close(self._worker)

    def close(self) -> None:
        self.stream.close()
        for descriptor in (self._shown, self._console):
            os.close(descriptor)


@pytest.fixture
def pipes() -> Iterator[Any]:
    made: list[Pipes] = []

    def make(**options: Any) -> Pipes:
        made.append(Pipes(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_whole_lines_are_shown_at_once(pipes: Any) -> None:
    stream = pipes()
    stream.send(b"one\ntwo\n")

    assert stream.shown() == b"one\ntwo\n"
    assert stream.stream.deadline() is None
    stream.end()


def test_half_a_line_waits_for_its_end_or_a_moment(pipes: Any) -> None:
    stream = pipes()
    stream.send(b"one\nha", now=10.0)
    assert stream.shown() == b"one\n"
    stream.send(b"lf\n", now=10.01)
    assert stream.shown() == b"half\n"

    stream.send(b"Password: ", now=11.0)
    assert stream.stream.deadline() == pytest.approx(11.05)
    stream.stream.tick(11.04)
    assert stream.shown() == b""
    stream.stream.tick(11.06)
    assert stream.shown() == b"Password: "
    stream.end()


def test_progress_bars_end_their_lines_with_a_carriage_return(pipes: Any) -> None:
    stream = pipes()
    stream.send(b" 10%\r 20%\r 3")

    assert stream.shown() == b" 10%\r 20%\r"
    stream.end()


def test_the_prefix_stands_once_before_each_line(pipes: Any) -> None:
    stream = pipes(prefix=b"[rank1]: ")
    stream.send(b"one\ntwo\nthr", now=1.0)
    stream.stream.tick(2.0)
    stream.send(b"ee\nfour\n", now=3.0)

    assert stream.shown() == b"[rank1]: one\n[rank1]: two\n[rank1]: three\n[rank1]: four\n"
    stream.end()


def test_the_log_gets_every_byte_without_prefix(pipes: Any, tmp_path: Path) -> None:
    log = Log(tmp_path / "log", pytest.fail)
    stream = pipes(prefix=b"[rank1]: ", log=log)
    stream.send(b"one\ntw")

    assert (tmp_path / "log").read_bytes() == b"one\ntw"
    stream.end()


def test_a_traceback_is_held_and_can_be_taken(pipes: Any) -> None:
    stream = pipes(delay_tracebacks=True)
    stream.send(b"before\n" + TRACEBACK[:20], now=5.0)
    stream.send(TRACEBACK[20:], now=5.1)

    assert stream.shown() == b"before\n"
    assert stream.stream.delayed_since == 5.1
    assert stream.stream.take_delayed() == TRACEBACK
    stream.stream.tick(100.0)
    assert stream.shown() == b""
    stream.end()


def test_a_traceback_that_ends_nothing_is_shown_in_one_piece_after_a_moment(pipes: Any) -> None:
    stream = pipes(delay_tracebacks=True)
    stream.send(TRACEBACK, now=5.0)
    stream.send(b"last lines\n", now=5.4)
    assert stream.stream.deadline() == pytest.approx(8.0)
    stream.stream.tick(7.9)
    assert stream.shown() == b""

    stream.stream.tick(8.1)
    assert stream.shown() == TRACEBACK + b"last lines\n"
    stream.send(b"later\n", now=9.0)
    assert stream.shown() == b"later\n"
    stream.end()


def test_a_worker_that_keeps_writing_shows_its_traceback_sooner(pipes: Any) -> None:
    stream = pipes(delay_tracebacks=True)
    stream.send(TRACEBACK, now=5.0)
    stream.send(b" 10%\r", now=5.6)

    assert stream.shown() == TRACEBACK + b" 10%\r"
    stream.end()


def test_the_last_traceback_of_a_worker_that_fails_is_held_longer(pipes: Any, tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    stream = pipes(delay_tracebacks=True, record=record)
    stream.send(TRACEBACK, now=5.0)
    record.touch()
    stream.send(b"[W1122] the group was not destroyed\n", now=6.0)
    stream.stream.tick(24.9)
    assert stream.shown() == b""
    assert stream.stream.deadline() == pytest.approx(25.0)

    stream.stream.tick(25.1)
    assert stream.shown().startswith(TRACEBACK)
    stream.end()


def test_what_is_held_has_a_limit(pipes: Any) -> None:
    stream = pipes(delay_tracebacks=True)
    stream.send(TRACEBACK, now=5.0)
    for _ in range(20):
        stream.send(b"x" * 4095 + b"\n", now=5.0)

    assert stream.shown().startswith(TRACEBACK)
    stream.end()


def test_the_last_words_are_the_last_traceback_or_lines(pipes: Any) -> None:
    stream = pipes()
    stream.send(b"".join(b"%d\n" % number for number in range(100)))
    assert stream.stream.tail() == b"".join(b"%d\n" % number for number in range(80, 100))

    stream.send(b"[rank1]: " + TRACEBACK)
    assert stream.stream.tail() == b"[rank1]: " + TRACEBACK
    stream.end()


def test_drain_shows_what_is_left_and_sees_the_end(pipes: Any) -> None:
    stream = pipes()
    os.write(stream._worker, b"one\nhalf")
    stream.end()
    stream.stream.drain(0.0)

    assert stream.shown() == b"one\nhalf"
    assert stream.stream.closed


def test_the_capture_is_a_terminal_where_ours_is_one() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    reading, writing = open_capture(null)
    assert not os.isatty(writing)
    ours, terminal = os.openpty()
    inner, worker = open_capture(terminal)

    assert os.isatty(worker)
    os.write(worker, b"a\nb\r\n")
    assert os.read(inner, 100) == b"a\nb\r\n"  # the outer terminal alone translates line ends
    for descriptor in (null, reading, writing, ours, terminal, inner, worker):
        os.close(descriptor)
