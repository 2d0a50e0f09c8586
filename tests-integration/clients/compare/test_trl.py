"""trl on two processes, and a loop in its style with its own rewards, on accel and on accelerate."""

from __future__ import annotations

import pytest

from accel_world.compared import Compared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# In addition to the files of accelerate's checkpoints: docs/checkpoints.md.
OURS = ["*/accel_manifest.json", "*/dl_state_dict*.bin"]


def assert_same(both: Compared) -> None:
    both.assert_same_results()
    both.assert_same_files(but=OURS)
    both.assert_same_tensors("*.safetensors")


@pytest.mark.parametrize("trainer", ["finetune", "prefer", "reward"])
def test_trainers_on_two_processes(compared, trainer: str):
    assert_same(compared("trl_trainers", trainer, processes=2))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_with_rewards(compared, processes: int):
    both = compared("reward_loop", processes=processes)

    assert_same(both)
    assert len(both.accel.results["reward"]["texts"][0]) == 7
