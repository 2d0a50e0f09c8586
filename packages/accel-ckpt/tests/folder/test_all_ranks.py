from __future__ import annotations

from typing import Any

import pytest

from accel_ckpt.errors import CheckpointError
from accel_ckpt.folder.all_ranks import raise_if_any_failed, run_on_all_ranks, run_on_main
from accel_state.process.state import current_process


def _fail_on(failing: list[int]) -> str:
    process = current_process()

    def work() -> int:
        if process.rank in failing:
            raise OSError(28, f"disk {process.rank} full")
        return process.rank

    try:
        return f"made {run_on_all_ranks(work, process, 'writing')}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_all_succeed_or_all_fail(world: Any) -> None:
    assert world.run(_fail_on, [], size=3) == ["made 0", "made 1", "made 2"]

    told = "CheckpointError: writing failed on another process. process 1: OSError: [Errno 28] disk 1 full"
    assert world.run(_fail_on, [1], size=3) == [told, "OSError: [Errno 28] disk 1 full", told]


def test_every_failing_process_is_named(world: Any) -> None:
    messages = world.run(_fail_on, [0, 2], size=3)

    assert messages[1].endswith(
        "process 0: OSError: [Errno 28] disk 0 full; process 2: OSError: [Errno 28] disk 2 full"
    )


def _from_main(fail: bool) -> str:
    process = current_process()

    def work() -> dict[str, int]:
        assert process.is_main
        if fail:
            raise ValueError("no")
        return {"rank": process.rank}

    try:
        return str(run_on_main(work, process, "opening"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_main_process_decides(world: Any) -> None:
    assert world.run(_from_main, False) == ["{'rank': 0}"] * 2
    assert world.run(_from_main, True) == [
        "ValueError: no",
        "CheckpointError: opening failed on the main process. ValueError: no",
    ]


def test_alone() -> None:
    process = current_process()
    raise_if_any_failed(None, process, "x")
    assert run_on_all_ranks(lambda: 3, process, "x") == run_on_main(lambda: 3, process, "x") == 3
    with pytest.raises(KeyError, match="k"):
        raise_if_any_failed(KeyError("k"), process, "x")


def test_the_error_is_a_runtime_error() -> None:
    assert issubclass(CheckpointError, RuntimeError)
