"""transformers' Trainer on accel and on accelerate: the same losses, evaluations, predictions and files."""

from __future__ import annotations

import pytest

CASES = ("whole", "resumed", "limited", "bf16")


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1 process", "2 processes"])
def both(request: pytest.FixtureRequest, compared):
    return compared("trainer", *CASES, processes=request.param)


def test_training_evaluation_and_prediction(both):
    both.assert_same_results("whole")
    both.assert_same_results("limited")
    both.assert_same_results("bf16", rtol=1e-3, atol=1e-3)


def test_resuming_within_an_epoch_ends_as_the_unbroken_run(both):
    both.assert_same_results("resumed")
    for side in (both.accel, both.accelerate):
        assert side.results["resumed"] == side.results["whole"]


def test_the_files(both):
    both.assert_same_files(but=["results.json"])
    both.assert_same_tensors("whole/*.safetensors", "resumed/*.safetensors", "limited/*.safetensors")
    kept = {name.split("/")[1] for name in both.accel.files("limited/checkpoint-*")}
    assert kept == {"checkpoint-9", "checkpoint-10"}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp2", "zero2", "zero3"])
def test_sharded(compared, case: str):
    # On CPUs accelerate trains whole replicas here, and saves so: the losses are the same, and the files not.
    compared("trainer", case, processes=2).assert_same_results(rtol=1e-4, atol=1e-4)
