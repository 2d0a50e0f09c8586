from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from accel_ops.module_tensors import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(2), persistent=False)
        self.norm.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)


class Marked(nn.Parameter):
    """A parameter with an attribute, as quantized ones have them."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, scale: float = 1.0) -> Marked:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale
        return made


def names(*args, **kwargs) -> list[str]:
    return [name for name, _ in named_module_tensors(Net(), *args, **kwargs)]


def test_tensors_are_listed_as_torch_lists_them():
    assert names() == ["scale", "positions"]
    assert names(include_buffers=False) == ["scale"]
    assert names(remove_non_persistent=True) == ["scale"]
    parameters = ["scale", "embed.weight", "norm.weight", "norm.bias"]
    kept = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert names(recurse=True) == [*parameters, "positions", *kept, "norm.cache"]
    assert names(recurse=True, remove_non_persistent=True) == [*parameters, *kept]
    assert names(False, True) == parameters


def test_to_meta_and_back_with_a_value():
    model = Net()
    value = torch.rand(5, 3)

    set_module_tensor_to_device(model, "embed.weight", "meta")
    assert model.embed.weight.device == META
    assert type(model.embed.weight) is nn.Parameter
    set_module_tensor_to_device(model, "embed.weight", "cpu", value=value)
    assert torch.equal(model.embed.weight, value)
    assert model.embed.weight.data_ptr() == value.data_ptr()
    assert model.embed.weight.requires_grad


def test_a_tensor_that_stays_where_it_is_stays_the_same_object():
    model = Net()
    old = model.scale

    set_module_tensor_to_device(model, "scale", "cpu")
    assert model.scale is old


@pytest.mark.parametrize("given", [torch.float64, "float64", "torch.float64"])
def test_the_dtype_requested_or_the_current_one(given):
    model = Net()

    set_module_tensor_to_device(model, "scale", "cpu", value=torch.tensor([3, 4]))
    assert model.scale.tolist() == [3.0, 4.0]
    assert model.scale.dtype == torch.float32
    set_module_tensor_to_device(model, "scale", "cpu", dtype=given)
    assert model.scale.dtype == torch.float64
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", value=torch.tensor(7.0))
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert "num_batches_tracked" in model.norm._buffers


def test_what_does_not_fit_is_named_and_changes_nothing():
    model = Net()
    before = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    set_module_tensor_to_device(model, "norm.running_var", "meta")

    def rejects(message: str, name: str, device: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            set_module_tensor_to_device(model, name, device, **kwargs)

    turned = torch.zeros(3, 5)
    rejects("(5, 3), and the value given has (3, 5)", "head.weight", "cpu", value=turned)
    rejects("norm.running_var is on the meta device", "norm.running_var", "cpu")
    rejects("no tensor 'norm.nope': BatchNorm1d has no parameter or buffer 'nope'", "norm.nope", "cpu")
    rejects("no tensor 'body.weight': Net has no module 'body'", "body.weight", "cpu")
    rejects("no tensor 'norm'", "norm", "cpu")
    rejects("no tensor 'nothing'", "nothing", "cpu")
    rejects("no device disk here", "scale", "disk")
    of_cuda = "cuda:" if torch.backends.cuda.is_built() else ""
    rejects(f"no device {of_cuda}99 here", "scale", 99)
    rejects("no device cuda:99 here", "scale", torch.device("cuda", 99))
    rejects(
        "dtype must be a dtype of torch or its name", "scale", "cpu", dtype="float99", value=torch.ones(2)
    )
    assert before == {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}


def test_class_attributes_and_requires_grad_stay():
    model = nn.Module()
    model.weight = Marked(torch.zeros(2), requires_grad=False, scale=0.5)

    for step in ({"device": "meta"}, {"device": "cpu", "value": torch.ones(2)}):
        set_module_tensor_to_device(model, "weight", **step)
        assert type(model.weight) is Marked
        assert model.weight.scale == 0.5
        assert not model.weight.requires_grad
    assert model.weight.tolist() == [1, 1]


def test_recurrent_layers_compute_with_what_was_set():
    layer, other = nn.LSTM(2, 3), nn.LSTM(2, 3)
    inputs = torch.rand(4, 1, 2)
    for name, parameter in other.named_parameters():
        set_module_tensor_to_device(layer, name, "meta")
        set_module_tensor_to_device(layer, name, "cpu", value=parameter)

    assert torch.equal(layer(inputs)[0], other(inputs)[0])


def test_weights_of_bitsandbytes_are_quantized_on_the_way_and_keep_their_statistics():
    bnb = pytest.importorskip("bitsandbytes")
    value, inputs = torch.rand(64, 64), torch.rand(2, 64)
    plain = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    plain.load_state_dict({"weight": value})
    expected = plain.to("cpu")(inputs)
    layer = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", device="meta")

    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer.weight.dtype == torch.uint8
    packed = layer.weight.detach().clone()
    set_module_tensor_to_device(layer, "weight", "meta")
    set_module_tensor_to_device(layer, "weight", "cpu", value=packed)
    assert torch.equal(layer(inputs), expected)


def test_statistics_of_8_bit_weights_come_along_and_meta_holds_no_memory():
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(4, 4, bias=False, has_fp16_weights=False, device="meta")
    value = torch.arange(16, dtype=torch.int8).reshape(4, 4)

    set_module_tensor_to_device(layer, "weight", "cpu", value=value, fp16_statistics=torch.ones(4).half())
    assert type(layer.weight) is bnb.nn.Int8Params
    assert torch.equal(layer.weight.CB, value)
    assert torch.equal(layer.weight.SCB, torch.ones(4).half())
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.CB.is_meta


def check_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    model = nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))

    set_module_tensor_to_device(model, "weight", "meta")
    assert isinstance(model.weight, DTensor)
    assert model.weight.to_local().is_meta
    set_module_tensor_to_device(model, "weight", "cpu", value=whole)
    assert isinstance(model.weight, DTensor)
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.placements == (Shard(0),)
    assert torch.equal(model.weight.to_local(), whole.chunk(2)[mesh.get_rank()])
    set_module_tensor_to_device(model, "weight", "cpu", value=distribute_tensor(whole + 1, mesh, [Shard(0)]))
    assert torch.equal(model.weight.full_tensor(), whole + 1)


def test_a_dtensor_takes_its_shard_of_a_full_value(world):
    world.run(check_dtensors)


def test_quantized_tensors_of_torchao_move_and_take_no_plain_value():
    torchao = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(32, 32, bias=False)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    kind, quantized, inputs = type(layer.weight), layer.weight, torch.rand(2, 32)
    expected = layer(inputs)

    set_module_tensor_to_device(layer, "weight", "meta")
    assert type(layer.weight) is kind
    with pytest.raises(ValueError, match="a plain tensor, which would replace it"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(32, 32))
    set_module_tensor_to_device(layer, "weight", "cpu", value=quantized)
    assert type(layer.weight) is kind
    assert torch.equal(layer(inputs), expected)


def test_tied_weights_share_the_first_copy_of_a_device():
    model = Net()
    values = torch.rand(5, 3)
    shared = {values.data_ptr(): {}}
    for name in ("embed.weight", "head.weight"):
        set_module_tensor_to_device(model, name, "meta")
        set_module_tensor_to_device(
            model, name, "cpu", value=values, tied_params_map=shared, dtype=torch.float64
        )

    assert model.embed.weight is model.head.weight
    assert shared[values.data_ptr()] == {CPU: model.embed.weight}
    set_module_tensor_to_device(model, "head.weight", "meta", tied_params_map=shared)
    assert list(shared[values.data_ptr()]) == [CPU]
    set_module_tensor_to_device(model, "scale", "cpu", value=torch.zeros(2), tied_params_map=shared)
    assert len(shared) == 1


def test_tied_parameters_are_found_and_tied_again():
    model = Net()
    model.twin = model.norm
    groups = [["embed.weight", "head.weight"], ["norm.weight", "twin.weight"], ["norm.bias", "twin.bias"]]

    assert find_tied_parameters(model) == groups
    assert find_tied_parameters(nn.Linear(2, 2)) == []
    set_module_tensor_to_device(model, "embed.weight", "meta")
    kept = model.head.weight
    assert find_tied_parameters(model) == groups[1:]
    retie_parameters(model, [set(groups[0])])
    assert model.embed.weight is kept
    assert find_tied_parameters(model) == groups
    with pytest.raises(ValueError, match=re.escape("no tensor 'head.nope'")):
        retie_parameters(model, [["embed.weight", "head.nope"]])


def test_ties_over_devices_are_warned_of():
    tied = [["a.w", "b.c.w"]]

    check_tied_parameters_on_same_device(tied, {"": 0})
    check_tied_parameters_on_same_device(tied, {"a": 0, "b": 0})
    with pytest.warns(UserWarning, match=re.escape("{'a.w': 0, 'b.c.w': 'cpu'}")):
        check_tied_parameters_on_same_device(tied, {"a": 0, "b": 0, "b.c": "cpu"})
    with pytest.raises(ValueError, match=re.escape("nothing about b.c.w")):
        check_tied_parameters_on_same_device(tied, {"a": 0})


def test_models_of_transformers_say_whether_they_are_tied():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}

    for tied in (True, False):
        config = transformers.LlamaConfig(**sizes, vocab_size=10, tie_word_embeddings=tied)
        assert check_tied_parameters_in_config(transformers.LlamaForCausalLM(config)) is tied
        assert not check_tied_parameters_in_config(transformers.LlamaModel(config))
    assert not check_tied_parameters_in_config(Net())
