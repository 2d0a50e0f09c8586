"""A module's weights on a device for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload
from accel.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel.utils import align_module_device, has_offloaded_params
from accel_world.devices import needs_cuda

META, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture(params=["memory", "disk"])
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    """A model that is offloaded, with the values 1, 2 ... in its layers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index + 1)
    return cpu_offload(model) if request.param == "memory" else disk_offload(model, tmp_path)


def test_only_modules_with_a_hook_that_offloads_have_offloaded_parameters(offloaded: nn.Module) -> None:
    assert has_offloaded_params(offloaded[0])
    assert not has_offloaded_params(offloaded)  # it has no weights of its own
    add_hook_to_module(offloaded[1], ModelHook(), append=True)
    assert has_offloaded_params(offloaded[1])
    remove_hook_from_submodules(offloaded)
    assert not has_offloaded_params(offloaded[0])

    resident = nn.Linear(2, 2)
    assert not has_offloaded_params(resident)
    add_hook_to_module(resident, AlignDevicesHook("cpu"))
    assert not has_offloaded_params(resident)


def test_offloaded_weights_are_there_for_a_while(offloaded: nn.Module) -> None:
    with align_module_device(offloaded[1]):
        assert offloaded[1].weight.tolist() == [[3, 3], [3, 3]]
        assert offloaded[1].bias.device == CPU
        assert offloaded[0].weight.is_meta
        assert offloaded[1](torch.ones(1, 2)).tolist() == [[10, 10]]  # a call inside takes nothing away
        assert not offloaded[1].weight.is_meta

    assert offloaded[1].weight.is_meta


def test_another_device_counts_inside_alone(offloaded: nn.Module) -> None:
    hook = offloaded[0]._hf_hook
    with align_module_device(offloaded[0], "meta"):
        assert offloaded[0].weight.is_meta
        assert hook.execution_device == META

    assert hook.execution_device == CPU
    assert offloaded[0](torch.ones(1, 2)).tolist() == [[4, 4]]


def test_an_error_inside_ends_it_too(offloaded: nn.Module) -> None:
    with pytest.raises(KeyError), align_module_device(offloaded[0], "cpu"):
        raise KeyError
    assert offloaded[0].weight.is_meta
    assert offloaded[0]._hf_hook.execution_device == CPU


def test_a_weight_that_cannot_be_read_leaves_the_hook_as_it_was(tmp_path: Path) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    (tmp_path / "0.weight.dat").unlink()
    with pytest.raises(FileNotFoundError, match=r"0\.weight\.dat"), align_module_device(model[0], "meta"):
        pass
    assert model[0]._hf_hook.execution_device == CPU
    assert model[0].bias.is_meta


def test_weights_without_a_hook_move_and_come_back_as_the_same_objects() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = list(model.parameters())
    with align_module_device(model[0], "meta"):
        assert model[0].weight.is_meta
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[1].weight.device == CPU

    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_weights_of_modules_inside_stay_where_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with align_module_device(model, "meta"):
        assert model[0].weight.device == CPU


@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_is_changed_inside_is_kept(device: str | None) -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with align_module_device(layer, device), torch.no_grad():
        layer.weight.fill_(7)

    assert layer.weight is before
    assert layer.weight.eq(7).all()


def test_a_parameter_that_is_replaced_inside_gives_its_values() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with align_module_device(layer, "cpu"):
        layer.weight = nn.Parameter(torch.full((2, 2), 5.0))

    assert layer.weight is before
    assert layer.weight.eq(5).all()


def test_an_error_inside_brings_weights_back() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError), align_module_device(layer, "meta"):
        raise KeyError
    assert layer.weight.device == CPU


def test_a_device_that_is_not_there_changes_nothing() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with pytest.raises((RuntimeError, AssertionError, ValueError)), align_module_device(layer, "cuda:99"):
        pass
    assert layer.weight is before


@pytest.mark.gpu
@needs_cuda
def test_what_is_changed_on_the_gpu_is_kept() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight
    with align_module_device(layer, "cuda:0"), torch.no_grad():
        assert layer.weight.is_cuda
        layer.weight.fill_(7)

    assert layer.weight is before
    assert layer.weight.eq(7).all()
    model = cpu_offload(nn.Sequential(layer), "cuda:0")
    with align_module_device(model[0]):
        assert model[0].weight.is_cuda
        assert model[0].weight.eq(7).all()
    assert model[0].weight.is_meta
