"""diffusers on accel and on accelerate: a UNet that is trained, and pipelines whose models are offloaded."""

from __future__ import annotations

import pytest

# In addition to the files of accelerate's checkpoints: docs/checkpoints.md.
OURS = ["*/accel_manifest.json", "*/dl_state_dict*.bin"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_unet_is_trained(compared, processes: int):
    both = compared("diffusion", "unconditional", processes=processes)

    both.assert_same_results()
    # Their names have the time; what was logged is among the results.
    both.assert_same_files(but=[*OURS, "*/logs/*"])
    both.assert_same_tensors("*.safetensors")


def test_pipelines_are_offloaded(compared):
    both = compared("diffusion", "offload_models", "offload_layers", "place")

    both.assert_same_results()
    both.assert_same_files(but=OURS)
    layers = both.accel.results["offload_layers"]
    drawn = both.accel.results["offload_models"]["plain"][0]
    assert [layers[name][1] == drawn for name in layers] == [True] * 3 + [False] * 2
