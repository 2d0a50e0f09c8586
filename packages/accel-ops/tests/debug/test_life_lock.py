"""Noticing the end of a process: what no other test can show on one machine."""

import socket

import pytest

from accel_ops.debug.life_lock import LifeLock, has_ended


def test_nothing_is_known_of_a_process_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = LifeLock()
    try:
        # A process does not see its own locks, so that this one looks as after its end.
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert not has_ended(lock.name)
        monkeypatch.undo()
        assert has_ended(lock.name)
    finally:
        lock.release()
