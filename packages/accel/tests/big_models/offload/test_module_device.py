"""A module's weights on a device for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, load_checkpoint_and_dispatch
from accel.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel.utils import align_module_device, has_offloaded_params
from accel_ckpt.weights.files import save_weights
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


def fill(layer: nn.Module, value: float) -> None:
    with torch.no_grad():
        layer.weight.fill_(value)


def fill_data(layer: nn.Module, value: float) -> None:
    layer.weight.data.fill_(value)


def put(layer: nn.Module, value: float) -> None:
    layer.weight = nn.Parameter(torch.full_like(layer.weight, value))


@pytest.mark.parametrize("change", [fill, fill_data, put])
def test_what_is_changed_of_offloaded_weights_is_kept(offloaded: nn.Module, change: Any) -> None:
    with align_module_device(offloaded[0], "cpu"):
        change(offloaded[0], 7)

    assert offloaded[0].weight.is_meta
    assert offloaded.state_dict()["0.weight"].eq(7).all()
    assert offloaded[0](torch.ones(1, 2)).tolist() == [[16, 16]]
    with align_module_device(offloaded[0]):
        assert offloaded[0].weight.eq(7).all()
    remove_hook_from_submodules(offloaded)
    assert offloaded[0].weight.eq(7).all()
    assert offloaded[1].weight.eq(3).all()


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_is_changed_of_weights_that_are_read_in_place_is_kept(tmp_path: Path, has_folder: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save_weights(model.state_dict(), tmp_path / "checkpoint")
    content = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    folder = tmp_path / "offloaded" if has_folder else None
    model = load_checkpoint_and_dispatch(
        model.to("meta"), tmp_path / "checkpoint", {"": "disk"}, offload_folder=folder
    )
    with align_module_device(model[0]):
        fill(model[0], 7)

    assert model.state_dict()["0.weight"].eq(7).all()
    assert model.state_dict()["1.weight"].eq(7).all()
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == content


def test_a_weight_of_another_shape_is_not_dropped_in_silence(offloaded: nn.Module) -> None:
    with (
        pytest.raises(ValueError, match=r"weight of Linear now has the shape \[3, 2\], but \[2, 2\] where"),
        align_module_device(offloaded[0]),
    ):
        offloaded[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert offloaded[0].weight.is_meta


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


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_changes_to_quantized_weights_are_rejected(library: str) -> None:
    layer: nn.Module = nn.Linear(64, 64)
    if library == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        model = nn.Sequential(layer)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    else:
        layer = pytest.importorskip("bitsandbytes").nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        model = nn.Sequential(layer.to("cpu"))
    x = torch.ones(2, 64)
    cpu_offload(model, CPU)
    expected = model(x)
    with align_module_device(model[0]):
        assert torch.equal(model[0](x), expected)  # a forward changes nothing
    with (
        pytest.raises(ValueError, match=r"weight of Linear.* is quantized .* cannot be stored"),
        align_module_device(model[0]),
    ):
        model[0].weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    assert torch.equal(model(x), expected)
