"""trl, peft and transformers' device maps, on accel and on accelerate."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(1200)  # both sides are run within the first test of each

# In addition to the files of accelerate's checkpoints: docs/checkpoints.md.
OURS = ["*/accel_manifest.json", "*/dl_state_dict*.bin"]


def test_adapters(compared):
    both = compared("adapters")

    both.assert_same_results()
    both.assert_same_files(but=OURS)
    both.assert_same_tensors("*adapter_model.safetensors", "*/merged/*.safetensors")


def test_models_over_memory_and_disk(compared):
    both = compared("big_models")

    both.assert_same_results()
    # load_checkpoint_and_dispatch reads safetensors where they are, and writes no copy.
    both.assert_same_files(but=["dispatch/checkpoint/*"])


@pytest.mark.slow
def test_trl(compared):
    both = compared("trl_trainers")

    both.assert_same_results()
    both.assert_same_files(but=OURS)
    both.assert_same_tensors("*.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "parts"), [(1, ("embed", "sample", "rank")), (2, ("rank",))], ids=["1", "2"]
)
def test_trainers_of_sentences(compared, processes: int, parts: tuple[str, ...]):
    both = compared("sentences", *parts, processes=processes)

    both.assert_same_results()
    both.assert_same_files(but=OURS)
    both.assert_same_tensors("*.safetensors")


@pytest.mark.slow
def test_models_of_sentences_over_memory_and_disk(compared):
    both = compared("sentences", "place")

    both.assert_same_results()
    both.assert_same_files(but=OURS)
