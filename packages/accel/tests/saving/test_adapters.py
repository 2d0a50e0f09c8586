"""Which entries of a state belong to adapters, where modules are wrapped."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.saving.adapters import to_model_names, with_wrapper_names
from accel_ckpt.errors import CheckpointError


def names_in_wrappers() -> dict[str, str]:
    policy = functools.partial(
        lambda_auto_wrap_policy,
        lambda_fn=lambda part: isinstance(part, torch.nn.Sequential | torch.nn.Linear),
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy=policy, use_orig_params=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
    prepared = accelerator.prepare(model)
    return with_wrapper_names(accelerator.unwrap_model(prepared), ["0.0.weight", "0.1.bias", "other"])


def test_names_of_a_state_lead_through_wrappers(world):
    """peft finds its layers by the names of modules, and saved nothing of wrapped ones."""
    assert world.run(names_in_wrappers, size=1)[0] == {
        "0._fsdp_wrapped_module.0.weight": "0.0.weight",
        "0._fsdp_wrapped_module.1.bias": "0.1.bias",
        "other": "other",
    }


def test_names_without_wrappers_stay():
    names = ["0.weight", "0.bias"]

    found = with_wrapper_names(torch.nn.Sequential(torch.nn.Linear(2, 2)), names)

    assert found == dict(zip(names, names, strict=True))


def test_a_file_of_other_adapters_is_rejected_by_its_names():
    names = {"up.weight": "up.default.weight", "down.weight": "down.default.weight"}

    assert to_model_names({"down.weight": 1, "up.weight": 2}, names, "file") == {
        "down.default.weight": 1,
        "up.default.weight": 2,
    }
    with pytest.raises(
        CheckpointError, match=r"file .* It has side.weight .* lacks up.weight. .*adapter_only"
    ):
        to_model_names({"down.weight": 1, "side.weight": 2}, names, "file")
