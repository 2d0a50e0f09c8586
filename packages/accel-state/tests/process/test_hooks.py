from __future__ import annotations

from unittest import mock

import pytest

from accel_state.process import hooks
from accel_state.process.state import PartialState
from accel_world.pool import World


def _calls_of_a_run() -> list[tuple[str, int]]:
    calls: list[tuple[str, int]] = []
    with mock.patch.object(hooks, "_calls", None):
        hooks.register(
            joined=lambda process: calls.append(("joined", process.rank)),
            waits=lambda process: calls.append(("waits", process.rank)),
            leaves=lambda: None,
        )
        state = PartialState()
        PartialState()
        state.wait_for_everyone()
        with state.main_process_first():
            pass
    return calls


def test_joining_and_every_wait_are_reported_in_debug_mode(world: World) -> None:
    calls = world.run(_calls_of_a_run, env={"ACCELERATE_DEBUG_MODE": "true"})

    assert calls == [[("joined", rank), ("waits", rank), ("waits", rank)] for rank in range(2)]


def test_nothing_is_reported_without_debug_mode(world: World) -> None:
    assert world.run(_calls_of_a_run) == [[], []]


def test_one_process_has_nobody_to_wait_for(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "true")

    assert _calls_of_a_run() == []


def _wait_alone() -> bool:
    with mock.patch.object(hooks, "_calls", None):
        PartialState().wait_for_everyone()
    return True


def test_debug_mode_needs_nobody_who_listens(world: World) -> None:
    assert world.run(_wait_alone, env={"ACCELERATE_DEBUG_MODE": "true"}) == [True, True]
