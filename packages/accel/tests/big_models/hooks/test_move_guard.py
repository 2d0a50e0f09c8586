"""Moving a dispatched model, which its hooks would not notice."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import dispatch_model
from accel.big_models.hooks.move_guard import MoveGuard
from accel.hooks import add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to(torch.ones(1))])
def test_an_offloaded_model_cannot_be_moved(move, tmp_path: Path) -> None:
    model = dispatch_model(net(), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match=r"Sequential has weights offloaded.*remove_hook_from_submodules"):
        move(model)

    assert model[1].weight.is_meta
    assert model(torch.ones(1, 2)).shape == (1, 2)


def moves_of_torch() -> list[str]:
    """The methods of a module that take a device and nothing else."""
    functions = inspect.getmembers(nn.Module, inspect.isfunction)
    return [
        name for name, function in functions if list(inspect.signature(function).parameters)[1:] == ["device"]
    ]


@pytest.mark.parametrize("name", ["to", "cpu", *moves_of_torch()])
def test_each_method_that_moves_a_model_is_guarded(name: str) -> None:
    model = net()
    add_hook_to_module(model, MoveGuard(offloaded=True))
    with pytest.raises(RuntimeError, match=rf"{name}\(\) cannot move it"):
        getattr(model, name)("cuda") if name == "to" else getattr(model, name)()


def test_a_model_on_its_devices_is_moved_with_a_warning() -> None:
    model = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    with pytest.warns(UserWarning, match=r"Sequential is dispatched over devices, and to\(\) moves it away"):
        assert model.to("meta") is model

    assert model[0].weight.is_meta


def test_a_change_of_dtype_is_no_move(recwarn: pytest.WarningsRecorder) -> None:
    model = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    model.to(torch.float64).to(dtype=torch.float32)

    assert not recwarn.list
    assert model[0].weight.dtype is torch.float32


def test_a_model_without_hooks_has_its_methods_again(tmp_path: Path) -> None:
    model = net()
    before = set(vars(model))
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    remove_hook_from_submodules(model)

    assert set(vars(model)) - before == {"hf_device_map"}
    assert model.to("cpu") is model


def test_a_method_of_the_instance_is_left_alone() -> None:
    model = net()
    model.to = lambda *args: "mine"  # type: ignore[method-assign]
    add_hook_to_module(model, MoveGuard(offloaded=True))
    assert model.to("cpu") == "mine"
    remove_hook_from_module(model)
    assert model.to("cpu") == "mine"


def test_copies_guard_themselves() -> None:
    model = net()
    add_hook_to_module(model, MoveGuard(offloaded=True))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match="cannot move it"):
            other.cpu()
        remove_hook_from_module(other)
        assert other.cpu() is other
    with pytest.raises(RuntimeError, match="cannot move it"):
        model.cpu()


def test_a_method_that_outlives_its_model_says_so() -> None:
    model = net()
    add_hook_to_module(model, MoveGuard(offloaded=False))
    to = model.to
    del model
    gc.collect()

    with pytest.raises(ReferenceError, match=r"the model of this to\(\) has been freed"):
        to("cpu")
