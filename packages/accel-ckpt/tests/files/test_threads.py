"""Threads that are all there from the start."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from accel_ckpt.files.threads import Threads


def test_threads_that_have_started_end_when_another_cannot_start(monkeypatch: Any) -> None:
    start, started = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Threads(4, "waiting")
    left = [thread.is_alive() for thread in started]
    for _ in range(2):  # that a failure of this test ends
        for thread in started:
            thread.join(0.1)
    assert left == [False, False]
