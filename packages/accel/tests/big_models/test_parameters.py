"""Copies of parameters and buffers on other devices, of every class, and models made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accel.big_models.parameters import META, move, on_meta
from accel.hooks import remove_hook_from_submodules
from accel.utils import align_module_device, set_module_tensor_to_device

CPU = torch.device("cpu")


class Tagged(nn.Parameter):
    """A class of parameters that has attributes."""


def test_what_needs_no_change_is_the_same_object():
    weight = nn.Parameter(torch.ones(2))

    assert move(weight, weight, CPU) is weight
    assert move(weight, weight, None) is weight
    assert on_meta(on_meta(weight)).is_meta


def test_a_parameter_keeps_its_class_attributes_and_whether_it_is_trained():
    own = Tagged(torch.ones(2), requires_grad=False)
    own.tag = "mine"
    for made in (move(own, own, META), on_meta(own), move(torch.zeros(2), own, CPU)):
        assert type(made) is Tagged
        assert (made.tag, made.requires_grad) == ("mine", False)


def test_a_stored_value_takes_the_dtype_of_the_model():
    own = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    made = move(torch.full((2,), 3.0), own, CPU)

    assert (made.dtype, made.tolist()) == (torch.bfloat16, [3, 3])
    assert made.requires_grad


def test_a_stored_parameter_takes_over_whether_it_is_trained():
    stored = nn.Parameter(torch.ones(2))

    assert move(stored, nn.Parameter(torch.ones(2), requires_grad=False), CPU) is stored
    assert not stored.requires_grad


def test_buffers_stay_plain_tensors():
    own = torch.arange(3)
    for made in (move(own, own, CPU), move(own, own, META), on_meta(own)):
        assert type(made) is torch.Tensor
        assert made.dtype is torch.int64


def quantized_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def quantized_bitsandbytes(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bnb = pytest.importorskip("bitsandbytes")
        if kind == "4 bits":
            layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
        else:
            layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        model = nn.Sequential(layer, nn.Linear(64, 64)).requires_grad_(False)
        return model.to("cpu")  # which quantizes it

    return make


QUANTIZED = {
    "torchao": quantized_torchao,
    "4 bits": quantized_bitsandbytes("4 bits"),
    "8 bits": quantized_bitsandbytes("8 bits"),
}


@pytest.mark.parametrize(
    "way", ["offloaded to memory", "offloaded to the disk", "dispatched", "part on the disk"]
)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_models_run_offloaded_or_say_that_they_cannot(kind: str, way: str, tmp_path: Path):
    torch.manual_seed(0)
    model, x = QUANTIZED[kind](), torch.randn(2, 64)
    expected, before, keys = model(x), model[0].weight, list(model.state_dict())
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "offloaded to memory": cpu_offload,
        "offloaded to the disk": lambda model: disk_offload(model, tmp_path),
        "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
        "part on the disk": lambda model: dispatch_model(
            model, {"0": "disk", "1": "cpu"}, offload_dir=tmp_path
        ),
    }
    if kind == "torchao" and "disk" in way:
        with pytest.raises(
            ValueError, match=r"0\.weight is of the class \w+, whose .*cannot be written.*cpu_offload"
        ):
            ways[way](model)
        assert model[0].weight is before
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(model(x), expected)
        return
    ways[way](model)

    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert type(model[0].weight) is type(before)
    assert model[0].weight.is_meta is (way != "dispatched")
    assert list(model.state_dict()) == keys
    with align_module_device(model[0]):
        assert type(model[0].weight) is type(before)
        assert model[0].weight.device == CPU
    remove_hook_from_submodules(model)
    assert type(model[0].weight) is type(before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("way", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_quantized_models_run_offloaded_in_evaluation(kind: str, way: str, tmp_path: Path):
    # Where the CPU has bf16 instructions, 4-bit layers lay out their weights again in evaluation.
    torch.manual_seed(0)
    model, x = QUANTIZED[kind]().eval(), torch.randn(2, 64)
    plain = copy.deepcopy(model)
    expected, before = plain(x), {name: value.clone() for name, value in model.state_dict().items()}

    model = cpu_offload(model) if way == "memory" else disk_offload(model, tmp_path)

    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        if kind == "8 bits":
            assert model[0].state.CB is None  # the layer keeps no weight
        state = model.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], value) for name, value in before.items())
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("way", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_quantized_models_that_have_run_are_offloaded(kind: str, way: str, tmp_path: Path):
    torch.manual_seed(0)
    model, x = QUANTIZED[kind]().eval(), torch.randn(2, 64)
    expected = model(x)
    before = {name: value.clone() for name, value in copy.deepcopy(model).state_dict().items()}

    model = cpu_offload(model) if way == "memory" else disk_offload(model, tmp_path)

    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_gradients_pass_through_offloaded_quantized_layers(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    model = QUANTIZED[kind]()
    plain, found = (torch.randn(2, 64).requires_grad_() for _ in range(2))
    found.data.copy_(plain.data)
    copy.deepcopy(model)(plain).sum().backward()

    disk_offload(model, tmp_path)(found).sum().backward()

    assert torch.equal(found.grad, plain.grad)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_aligned_and_come_back(kind: str):
    model = QUANTIZED[kind]()
    before = model[0].weight
    with align_module_device(model[0], "meta"):
        assert type(model[0].weight) is type(before)
        assert model[0].weight.is_meta

    assert model[0].weight is before


def tensor_parallel(folder: str) -> list[Any]:
    """Offload a model of DTensors in each way, and tell what became of it."""
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).requires_grad_(False)
    x = torch.ones(2, 4)
    expected = plain(x)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def make() -> nn.Module:
        return parallelize_module(
            copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )

    told: list[Any] = []
    for way in (cpu_offload, lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True)):
        model = make()
        placements = model[0].weight.placements
        exact = model(x)
        assert torch.allclose(exact, expected)
        way(model)
        assert all(torch.equal(model(x), exact) for _ in range(2))
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert all(
            torch.equal(value.full_tensor(), plain.state_dict()[name]) for name, value in state.items()
        )
        assert (type(model[0].weight), model[0].weight.placements) == (DTensor, placements)
        remove_hook_from_submodules(model)
        assert torch.equal(model(x), exact)

    model = make()
    with align_module_device(model[0], "meta"):
        assert isinstance(model[0].weight, DTensor)
        assert model[0].weight.is_meta
    whole = torch.arange(32.0).reshape(8, 4)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=whole)
    assert torch.equal(model[0].weight.full_tensor(), whole)

    torch.save(plain.state_dict(), f"{folder}/pytorch_model{torch.distributed.get_rank()}.bin")
    for way in (
        lambda model: disk_offload(model, f"{folder}/offload"),
        lambda model: dispatch_model(model, {"": "cpu", "2": "disk"}, offload_dir=f"{folder}/offload"),
        lambda model: load_checkpoint_and_dispatch(
            model, f"{folder}/pytorch_model{torch.distributed.get_rank()}.bin", {"": "cpu"}
        ),
    ):
        model = make()
        try:
            way(model)
        except ValueError as error:
            told.append(str(error))
        assert torch.allclose(model(x), expected)
    return told


@pytest.mark.parametrize("size", [1, 2])
def test_dtensors_run_offloaded_or_say_that_they_cannot(world, size: int, tmp_path: Path):
    for first, second, third in world.run(tensor_parallel, str(tmp_path), size=size):
        assert "0.weight is of the class DTensor, whose tensors are made of others" in first
        assert "2.weight is of the class DTensor" in second
        assert "a model that is sharded over processes takes no device_map" in third
    assert not list(tmp_path.rglob("*.dat"))
