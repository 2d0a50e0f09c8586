"""Single steps of FSDP under their documented names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.fsdp_groups import CheckpointedForward, apply_activation_checkpointing
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
)
from accel.utils.dataclasses import get_module_class_from_name
from accel.utils.fsdp_utils import get_parameters_from_modules
from accel_state.env import patch_environment


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def by_hand() -> list[Any]:
    """Shard, fill from the first process and point an optimizer to the parts, each by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=4
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    full = model.state_dict() if accelerator.is_main_process else {}
    full = {name: value.clone() for name, value in full.items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    old = dict(model.named_parameters())
    assert fsdp2_apply_ac(accelerator, model) is model
    assert isinstance(model[0].forward, CheckpointedForward)
    assert fsdp2_prepare_model(accelerator, model) is model
    assert fsdp2_prepare_model(accelerator, model) is model
    assert isinstance(model, FSDPModule)
    new = dict(model.named_parameters())
    fsdp2_switch_optimizer_parameters(optimizer, {old[name]: new[name] for name in old})
    assert all(
        parameter is item
        for parameter, item in zip(optimizer.param_groups[0]["params"], new.values(), strict=True)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fsdp2_load_full_state_dict(accelerator, model, full)
    gathered = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert isinstance(model[0].weight, DTensor)
    return [gathered, full]


def test_a_model_is_sharded_step_by_step(world):
    (gathered, full), (other, _) = world.run(by_hand)

    assert gathered.keys() == full.keys()
    for name, value in full.items():
        assert torch.equal(gathered[name], value)
        assert torch.equal(other[name], value)


def test_an_optimizer_is_pointed_to_new_parameters_by_the_old_ones_memory():
    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [old.weight], "lr": 0.5}, {"params": [old.bias]}], 0.1)

    fsdp2_switch_optimizer_parameters(
        optimizer, {old.weight.data_ptr(): new.weight, old.bias.data_ptr(): new.bias}
    )

    assert [group["params"][0] for group in optimizer.param_groups] == [new.weight, new.bias]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    with pytest.raises(KeyError, match="number 0 of a group of SGD"):
        fsdp2_switch_optimizer_parameters(optimizer, {})


def test_wrappers_are_taken_out_of_names():
    names = {
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.up.weight": 1,
        "_orig_mod.layers.1._checkpoint_wrapped_module.up.weight": 2,
        "head.weight": 3,
    }
    assert fsdp2_canonicalize_names(names) == {
        "layers.0.up.weight": 1,
        "layers.1.up.weight": 2,
        "head.weight": 3,
    }


def test_loading_on_one_process_alone_is_switched_in_the_environment():
    with patch_environment(ACCELERATE_USE_FSDP="", FSDP_CPU_RAM_EFFICIENT_LOADING=""):
        enable_fsdp_ram_efficient_loading()
        assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is True
        disable_fsdp_ram_efficient_loading()
        assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is False


def test_what_is_initialised_module_by_module_stays_tied():
    with torch.device("meta"):
        model = Net()

    initialise = ensure_weights_retied(
        lambda module: module.to_empty(device="cpu", recurse=False), model, torch.device("cpu")
    )
    for module in (model.first, model.second):
        initialise(module)

    assert model.first.weight is model.second.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_parameters_of_modules_and_classes_by_name():
    model = Net()
    assert get_parameters_from_modules("first", model, "cpu") == {model.first.weight, model.first.bias}
    assert get_parameters_from_modules([model.second], model, "cpu") == {model.first.weight}
    assert get_parameters_from_modules(None, model, "cpu") == set()
    assert get_module_class_from_name(model, "Linear") is torch.nn.Linear
    assert get_module_class_from_name(model, "Conv2d") is None


@pytest.mark.parametrize("offload", [True, False])
def test_what_checkpointing_keeps_rests_on_the_cpu_on_request(monkeypatch, offload):
    plain, entered = torch.autograd.graph.save_on_cpu, []

    def noting(**options: Any) -> Any:
        entered.append(options)
        return plain(**options)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", noting)
    layer = torch.nn.Linear(2, 2)
    apply_activation_checkpointing([layer], offload)
    layer(torch.ones(1, 2)).sum().backward()
    assert len(entered) == int(offload)
