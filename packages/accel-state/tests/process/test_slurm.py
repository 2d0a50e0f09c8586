from __future__ import annotations

import pytest

from accel_state.process.slurm import tasks_on_machine


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("4,2", [4, 2]), ("8(x2),4", [8, 8, 4]), ("1,3(x2),1", [1, 3, 3, 1])]
)
def test_tasks_of_each_machine(text: str, counts: list[int]) -> None:
    environ = {"SLURM_TASKS_PER_NODE": text}

    assert [tasks_on_machine(node, environ) for node in range(len(counts))] == counts


def test_the_step_comes_before_the_job() -> None:
    assert tasks_on_machine(1, {"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_TASKS_PER_NODE": "4,2"}) == 2


def test_nothing_is_known_outside_of_slurm() -> None:
    assert tasks_on_machine(0, {}) is None


@pytest.mark.parametrize("text", ["two", "4,", "4(x)", "4 2"])
def test_what_slurm_does_not_set_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_TASKS_PER_NODE=.* is not understood; Slurm sets e.g. 8"):
        tasks_on_machine(0, {"SLURM_TASKS_PER_NODE": text})


def test_a_machine_that_the_list_does_not_have_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"4,2 lists 2 machine.*SLURM_NODEID=2"):
        tasks_on_machine(2, {"SLURM_TASKS_PER_NODE": "4,2"})
