"""transformers' Trainer on accel and on accelerate: the same losses, evaluations, predictions and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)  # both sides are run within the first test of each

CASES = ("whole", "whole_resumed", "limited", "bf16")
PROCESSES = [pytest.param(1, id="1 process"), pytest.param(2, id="2 processes", marks=pytest.mark.slow)]


@pytest.fixture(params=PROCESSES)
def both(request: pytest.FixtureRequest, compared):
    return compared("trainer", *CASES, processes=request.param, own_launcher=True)


def assert_resumed(both, *cases: str) -> None:
    """Check that the runs which continued from a checkpoint ended as those without a break."""
    for side in (both.accel, both.accelerate):
        for case in cases:
            assert side.results[f"{case}_resumed"] == side.results[case]


def test_training_evaluation_and_prediction(both):
    both.assert_same_results("whole")
    both.assert_same_results("limited")
    both.assert_same_results("bf16", rtol=1e-3, atol=1e-3)


def test_resuming_within_an_epoch_ends_as_the_unbroken_run(both):
    both.assert_same_results("whole_resumed")
    assert_resumed(both, "whole")


def test_the_files(both):
    both.assert_same_files(but=["results.json"])
    both.assert_same_tensors("whole*/*.safetensors", "limited/*.safetensors")
    kept = {name.split("/")[1] for name in both.accel.files("limited/checkpoint-*")}
    assert kept == {"checkpoint-9", "checkpoint-10"}


@pytest.mark.slow
def test_the_best_checkpoint_workers_and_streams(compared):
    both = compared("trainer", "best", "stream", "stream_resumed")

    both.assert_same_results()
    assert_resumed(both, "stream")
    both.assert_same_files()
    both.assert_same_tensors("*.safetensors")


@pytest.mark.slow
def test_compiled(compared):
    both = compared("trainer", "compiled", "compiled_resumed")

    both.assert_same_results()
    assert both.accelerate.results["compiled"]["compiled"]
    assert_resumed(both, "compiled")
    both.assert_same_files()
    both.assert_same_tensors("*.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_deepspeed(compared, case: str):
    # On CPUs accelerate has DeepSpeed in one process alone.
    both = compared("trainer", case, f"{case}_resumed")

    both.assert_same_results()
    assert_resumed(both, case)
    both.assert_same_files()
    # Weights that are tied are copied there at stage 2, and written twice.
    both.assert_same_tensors("*.safetensors", but=["lm_head.weight"] if case == "zero2" else [])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp2", "parts", "zero2", "zero3"])
def test_sharded(compared, case: str):
    # On CPUs accelerate trains full replicas here, and saves so: the losses are the same, and the files not.
    both = compared("trainer", case, f"{case}_resumed", processes=2, own_launcher=True)

    both.assert_same_results(rtol=1e-4, atol=1e-4)
    shards = "*/global_step*" if "zero" in case else "*/pytorch_model_fsdp*"
    assert both.accel.files(shards)
    assert not both.accelerate.files(shards)
    if case != "parts":  # there the Trainer writes no full model
        both.assert_same_tensors("*/last/*.safetensors", rtol=1e-4, atol=1e-4)


FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
# The Trainer's own number of accumulation steps has to agree with that of the file.
ZERO = {"zero_stage": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
CONFIGS = {
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": FSDP},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO},
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {**ZERO, "zero_stage": 3, "zero3_save_16bit_model": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_sharded_by_the_launchers_config_file(compared, tmp_path: Path, case: str):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"compute_environment": "LOCAL_MACHINE", **CONFIGS[case]}))
    launch_args = ("--config_file", str(path))
    both = compared("trainer", "configured", processes=2, own_launcher=True, launch_args=launch_args)

    both.assert_same_results(rtol=1e-4, atol=1e-4)
    assert both.accel.files("*/global_step*" if "zero" in case else "*/pytorch_model_fsdp.bin")
    both.assert_same_tensors("*/last/*.safetensors", rtol=1e-4, atol=1e-4)
