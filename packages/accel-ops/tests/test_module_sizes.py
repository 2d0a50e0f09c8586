from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_ops.module_sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_max_layer_size,
)
from accel_state.enums import CustomDtype


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 5)


TENSORS = {
    "first.weight": 48,
    "first.bias": 16,
    "norm.weight": 16,
    "norm.bias": 16,
    "norm.running_mean": 16,
    "norm.running_var": 16,
    "norm.num_batches_tracked": 8,
    "second.weight": 80,
    "second.bias": 20,
}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 8),
        (torch.complex64, 8),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.bool, 1 / 8),
        (torch.uint4, 1 / 2),
        (CustomDtype.FP8, 1),
        (CustomDtype.INT4, 1 / 2),
        (CustomDtype.INT2, 1 / 4),
        ("int4", 1 / 2),
        ("float16", 2),
    ],
)
def test_bytes_of_an_element(dtype, size):
    assert dtype_byte_size(dtype) == size


@pytest.mark.parametrize("unknown", ["float99", None, 16])
def test_what_is_no_dtype_is_named(unknown):
    with pytest.raises(ValueError, match=f"not {unknown!r}"):
        dtype_byte_size(unknown)


def test_sizes_of_tensors_modules_and_model():
    modules = {"first": 64, "norm": 72, "second": 100, "": 236}

    assert compute_module_sizes(Net()) == {**TENSORS, **modules}
    assert compute_module_sizes(Net().to("meta")) == {**TENSORS, **modules}
    assert compute_module_sizes(Net())["nowhere"] == 0


def test_buffers_alone():
    buffers = {
        name: TENSORS[f"norm.{name}"] for name in ("running_mean", "running_var", "num_batches_tracked")
    }

    assert compute_module_sizes(Net(), buffers_only=True) == {
        **{f"norm.{name}": size for name, size in buffers.items()},
        "norm": 40,
        "": 40,
    }


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "torch.float16"])
def test_weights_in_another_dtype(dtype):
    sizes = compute_module_sizes(
        Net(), dtype=dtype, special_dtypes={"first.weight": "float32", "second.bias": "int4"}
    )

    assert sizes["first.weight"] == 48
    assert sizes["second.bias"] == 2.5
    assert sizes["norm.running_mean"] == 8
    assert sizes["norm.num_batches_tracked"] == 8
    assert sizes[""] == 48 + 8 + 40 + 40 + 2.5


def test_no_weight_grows_by_a_dtype():
    assert compute_module_sizes(Net(), dtype=torch.float64) == compute_module_sizes(Net())
    assert compute_module_sizes(Net(), special_dtypes={"first.bias": torch.float64})["first"] == 80


def test_tied_weights_count_once_under_their_first_name():
    model = Net()
    model.third = nn.Linear(4, 5)
    model.third.weight = model.second.weight
    model.again = model.norm
    sizes = compute_module_sizes(model)

    assert (sizes[""], sizes["second"], sizes["third"], sizes["again"]) == (256, 100, 20, 0)


def test_the_largest_layer():
    model = nn.Sequential(Net(), nn.Sequential(nn.Linear(4, 5), nn.Linear(1, 1)))
    sizes = compute_module_sizes(model)
    children = list(model.named_children())

    assert get_max_layer_size(children, sizes, []) == (100, ["0.second", "1.0"])
    assert get_max_layer_size(children, sizes, ["Net"]) == (236, ["0"])
    assert get_max_layer_size(children, sizes, "Net") == (236, ["0"])
    assert get_max_layer_size([("0.second.weight", model[0].second.weight)], dict(sizes), None) == (
        80,
        ["0.second.weight"],
    )
    assert get_max_layer_size([], sizes, []) == (0, [])
    assert calculate_maximum_sizes(model) == (344, (100, ["0.second", "1.0"]))
    model._no_split_modules = ["Net"]
    assert calculate_maximum_sizes(model) == (344, (236, ["0"]))
    assert calculate_maximum_sizes(nn.Linear(2, 1)) == (12, (12, [""]))


own = st.lists(st.integers(0, 5), max_size=3)
trees = st.recursive(own, lambda inner: st.tuples(own, st.lists(inner, max_size=3)), max_leaves=12)


def build(tree: list[int] | tuple[list[int], list[object]]) -> nn.Module:
    sizes, children = tree if isinstance(tree, tuple) else (tree, [])
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(f"p{index}", nn.Parameter(torch.empty(size)))
    for index, child in enumerate(children):
        module.add_module(f"m{index}", build(child))
    return module


@given(trees)
def test_a_module_has_the_bytes_of_its_parameters(tree):
    model = build(tree)
    sizes = compute_module_sizes(model)

    for name, module in model.named_modules():
        assert sizes[name] == sum(parameter.nbytes for parameter in module.parameters())
