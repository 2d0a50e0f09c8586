"""Hooks over the modules of a model: which module gets one, for which device, and with which weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)

META = torch.device("meta")
CPU = torch.device("cpu")


class Block(nn.Module):
    """A weight of its own, and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Reader(nn.Module):
    """Uses the weight of a module inside of it, which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight)


class Net(nn.Module):
    """Two blocks, a module without weights, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = Block(), nn.ReLU(), Block()
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x + self.table))) * self.unsaved


X = torch.ones(2, 3)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().requires_grad_(False)


def hooked(model: nn.Module) -> dict[str, list[ModelHook]]:
    """List the hooks of a model by the name of the module."""
    found: dict[str, list[ModelHook]] = {}
    for name, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        if hook is not None:
            found[name] = list(hook.hooks) if isinstance(hook, SequentialHook) else [hook]
    return found


def test_each_module_with_weights_of_its_own_gets_one_hook(net: Net) -> None:
    plain = copy.deepcopy(net)
    attach_align_device_hook(net, "cpu", offload=True)

    assert {name: len(hooks) for name, hooks in hooked(net).items()} == dict.fromkeys(
        ["", "first", "first.layer", "second", "second.layer"], 1
    )
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.table.device == net.unsaved.device == CPU
    assert torch.equal(net(X), plain(X))


def test_weights_are_looked_up_by_their_full_names(net: Net) -> None:
    plain = copy.deepcopy(net)
    weights = {f"model.{name}": value.clone() for name, value in net.state_dict().items()}
    weights["model.first.scale"] += 1
    plain.first.scale += 1
    attach_align_device_hook(net, "cpu", offload=True, weights_map=weights, module_name="model")

    assert torch.equal(net(X), plain(X))


def test_buffers_are_offloaded_when_requested_except_those_that_are_not_saved(net: Net) -> None:
    attach_align_device_hook(net, "cpu", offload=True, offload_buffers=True)

    assert net.table.is_meta
    assert net.unsaved.device == CPU


def test_a_weight_without_values_is_named(net: Net) -> None:
    with pytest.raises(ValueError, match=r"Block has no values for scale "):
        attach_align_device_hook(net, "cpu", offload=True, weights_map={"table": net.table})


@pytest.mark.parametrize("kind", ["a class that is named", "one of torch"])
def test_modules_that_use_weights_inside_of_them_load_them_all(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "one of torch":
        model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
        x, names = torch.ones(1, 2, 4), None
    else:
        model, x, names = nn.Sequential(Reader()), X, ["Reader"]
    expected = model(x)
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=names)

    assert list(hooked(model)) == ["0"]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(x), expected)


def test_execution_hooks_bring_weights_and_inputs_and_leave_other_hooks(net: Net) -> None:
    mine = ModelHook()
    add_hook_to_module(net.second, mine)
    attach_execution_device_hook(net, "meta")

    hooks = hooked(net)
    assert set(hooks) == {"", "first", "first.layer", "second", "second.layer"}
    assert hooks["second"] == [mine]
    assert net.first.scale.is_meta
    assert net.second.scale.device == CPU
    assert net.first(X).is_meta


def test_no_module_inside_of_a_preloaded_class_gets_an_execution_hook(net: Net) -> None:
    attach_execution_device_hook(net, "cpu", preload_module_classes=["Block"])

    assert set(hooked(net)) == {"", "first", "second"}


def test_one_device_for_all_is_one_hook(net: Net) -> None:
    attach_align_device_hook_on_blocks(net, "meta")

    (hook,) = hooked(net)[""]
    assert list(hooked(net)) == [""]
    assert (hook.io_same_device, hook.place_submodules) == (True, True)
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))


def test_all_offloaded_to_one_device(net: Net) -> None:
    plain = copy.deepcopy(net)
    attach_align_device_hook_on_blocks(net, "cpu", offload=True)

    assert all(parameter.is_meta for parameter in net.parameters())
    assert torch.equal(net(X), plain(X))


def test_blocks_run_where_their_longest_name_says(net: Net) -> None:
    devices = {"": "cpu", "first": "meta", "first.layer": "cpu"}
    attach_align_device_hook_on_blocks(net, devices)

    assert net.first.scale.is_meta
    assert net.first.layer.weight.device == CPU
    assert net.second.scale.device == net.table.device == CPU
    found = hooked(net)
    assert found["first"][0].execution_device == META
    assert found["first.layer"][0].execution_device == CPU
    assert found["second"][0].execution_device == CPU  # as the model, which it is in


def test_only_the_blocks_named_are_offloaded(net: Net) -> None:
    plain = copy.deepcopy(net)
    weights = net.state_dict()
    attach_align_device_hook_on_blocks(
        net, {"": "cpu", "second": "cpu"}, {"": False, "second": True}, weights_map=weights
    )

    assert {name for name, p in net.named_parameters() if p.is_meta} == {
        "second.scale",
        "second.layer.weight",
        "second.layer.bias",
    }
    assert torch.equal(net(X), plain(X))
    remove_hook_from_submodules(net)
    assert hooked(net) == {}


def test_a_block_that_has_a_hook_keeps_it(net: Net) -> None:
    mine = ModelHook()
    add_hook_to_module(net.first, mine)
    attach_align_device_hook_on_blocks(net, {"": "cpu"})

    assert hooked(net)["first"][0] is mine
    assert isinstance(hooked(net)["first"][1], AlignDevicesHook)


@pytest.mark.parametrize("offload", [True, False])
def test_the_model_itself_gets_one_hook_that_sees_where_inputs_were(net: Net, offload: bool) -> None:
    attach_align_device_hook_on_blocks(net, {"": "cpu"}, {"": offload}, weights_map=net.state_dict())

    (hook,) = hooked(net)[""]
    assert (hook.io_same_device, hook.execution_device, hook.offload) == (True, CPU, offload)


def test_a_block_without_a_device_is_named(net: Net) -> None:
    with pytest.raises(ValueError, match="offload has second, which execution_device lacks"):
        attach_align_device_hook_on_blocks(net, {"first": "cpu"}, {"first": False, "second": True})
    assert hooked(net) == {}


def test_a_module_under_two_names_gets_its_hooks_once() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, layer)
    attach_align_device_hook_on_blocks(model, {"0": "cpu", "1": "cpu"})

    assert len(hooked(model)["0"]) == 1
