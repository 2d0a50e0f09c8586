"""Checkpoints go both ways: what accelerate saved loads with accel, and what accel saved with accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_world.compared import Compared, assert_close

pytestmark = pytest.mark.timeout(1200)

PLAIN = (
    *("safetensors", "pickled", "named", "half", "stateful", "dispatched", "dropout"),
    *("two_models", "seedable"),
)
SHARDED = ("fsdp1_sharded", "fsdp2_sharded")
DEEPSPEED = ("zero1", "zero2", "zero3")


def save_and_load(
    compared: Callable[..., Compared], processes: int, *cases: str
) -> tuple[Compared, Compared]:
    """Run the cases on both sides, and continue on both sides from the folders of both."""
    saved = compared("checkpoints", "save", *cases, processes=processes)
    folders = [str(side.folder) for side in (saved.accel, saved.accelerate)]
    return saved, compared("checkpoints", "load", *cases, "--", *folders, processes=processes)


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        pytest.param(1, PLAIN, id="plain"),
        pytest.param(2, SHARDED, id="FSDP", marks=pytest.mark.slow),
        pytest.param(1, DEEPSPEED, id="DeepSpeed", marks=pytest.mark.slow),
    ],
)
def test_each_continues_from_the_checkpoints_of_the_other(compared, processes, cases):
    saved, loaded = save_and_load(compared, processes, *cases)
    for number, saver in enumerate((saved.accel, saved.accelerate)):
        for case in cases:
            # What it would be without the change of sides, bit for bit where all is in one piece.
            with_accel = loaded.accel.results[case][number]
            with_accelerate = loaded.accelerate.results[case][number]
            straight = saver.results[case]
            assert with_accel.get("weights") == with_accelerate.get("weights"), case
            assert with_accel["draws"] == with_accelerate["draws"] == straight["draws"], case
            tolerance = 1e-5 if case.startswith("fsdp") else 0.0
            both = [(with_accel, straight), (with_accelerate, straight)]
            if case == "dropout":
                # accelerate draws a seed for the second half of the epoch, so its dropout differs from that
                # of a run without a break. accel does so after a checkpoint of accelerate, too.
                both = [(with_accel, with_accelerate if number else straight)]
            elif case == "fsdp1_sharded":
                # On CPUs accelerate does not continue exactly from its own either, but the same from both.
                both[1] = with_accelerate, loaded.accelerate.results[case][1]
            for found, expected in both:
                assert_close(found["losses"], expected["losses"], rtol=tolerance, atol=tolerance, where=case)


@pytest.mark.slow
def test_each_continues_from_the_full_states_of_fsdp_of_the_other(compared):
    saved = compared("checkpoints", "save", "fsdp2_full", processes=2)
    folders = [side.folder for side in (saved.accel, saved.accelerate)]
    loaded = compared(
        "checkpoints", "load", "fsdp2_full", "fsdp1_full", "--", *map(str, folders), processes=2
    )

    saved.assert_same_files("*/checkpoint/*", but=["*/accel_manifest.json", "*/dl_state_dict.bin"])
    for folder in folders:
        checkpoint = folder / "fsdp2_full/checkpoint"
        weights = torch.load(checkpoint / "pytorch_model_fsdp.bin")
        optimizer = torch.load(checkpoint / "optimizer.bin")
        assert {*optimizer["state"]} == {*weights} - {"scale"}
        assert {*optimizer["param_groups"][0]["params"]} == {*optimizer["state"]}
    for number, saver in enumerate((saved.accel, saved.accelerate)):
        expected = saver.results["fsdp2_full"]["losses"]
        for side in (loaded.accel, loaded.accelerate):
            for case in ("fsdp2_full", "fsdp1_full"):
                found = side.results[case][number]["losses"]
                assert_close(found, expected, rtol=1e-5, atol=1e-5, where=case)


def test_names_after_loading(compared):
    saved, loaded = save_and_load(compared, 1, *PLAIN)
    for side in (saved.accel, saved.accelerate):
        # Four were saved, and total_limit is 2.
        folders = {name.split("/")[2] for name in side.files("named/checkpoints/*")}
        assert folders == {"checkpoint_2", "checkpoint_3"}
    for number in range(2):
        assert loaded.accel.results["named"][number]["names"] == ["checkpoint_3", "checkpoint_4"]
        assert loaded.accelerate.results["named"][number]["names"] == ["checkpoint_0", "checkpoint_3"]


def test_the_files_of_a_checkpoint_and_of_weights(compared):
    saved, _ = save_and_load(compared, 1, *PLAIN)
    ours = ["*/accel_manifest.json", "results.json", "*/dl_state_dict.bin", "*/gradients_0.safetensors"]
    saved.assert_same_files(but=ours)
    assert saved.accel.files("stateful/*/dl_state_dict.bin") == saved.accelerate.files("*/dl_state_dict.bin")
    assert {"model_1.safetensors", "optimizer_1.bin", "scheduler_1.bin"} <= {
        Path(name).name for name in saved.accel.files("two_models/checkpoint/*")
    }
    saved.assert_same_tensors("*/model*.safetensors")
    indices = saved.accel.files("*.index.json")
    assert indices
    for name in indices:
        found, expected = (
            json.loads((side.folder / name).read_text()) for side in (saved.accel, saved.accelerate)
        )
        assert found == expected, name
