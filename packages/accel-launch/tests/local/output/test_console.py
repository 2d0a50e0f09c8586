from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from accel_launch.local.output.console import Console, has_colour


def test_colour_is_for_terminals_whose_user_does_not_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, terminal = os.openpty()
    reading, writing = os.pipe()
    try:
        assert has_colour(terminal)
        assert not has_colour(writing)
        monkeypatch.setenv("TERM", "dumb")
        assert not has_colour(terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        assert not has_colour(terminal)
    finally:
        for descriptor in (ours, terminal, reading, writing):
            os.close(descriptor)


def test_it_writes_at_once_to_a_reader_and_to_a_file(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    Console(writing).write(b"line\n")
    assert os.read(reading, 100) == b"line\n"
    os.close(reading)
    os.close(writing)

    with (tmp_path / "out").open("wb") as file:
        Console(file.fileno()).write(b"line\n" * 10000)
    assert (tmp_path / "out").read_bytes() == b"line\n" * 10000


def test_a_slow_reader_does_not_block_and_loses_nothing() -> None:
    reading, writing = os.pipe()
    console = Console(writing)
    data = b"0123456789abcdef" * 100_000
    console.write(data)  # returns although nobody reads and the pipe is full
    assert console.pending
    assert console.full

    got = bytearray()

    def read() -> None:
        while part := os.read(reading, 65536):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    console.flush(block=True)
    os.close(writing)
    reader.join()
    os.close(reading)

    assert bytes(got) == data
    assert not console.pending


def test_a_reader_that_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    console = Console(writing)

    console.write(b"lost\n")

    assert not console.pending
    os.close(writing)
