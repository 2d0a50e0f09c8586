from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from accel_ops.trees.tensors import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
    listify,
    slice_tensors,
)

Pair = namedtuple("Pair", "x y")


def test_structure_and_back() -> None:
    data = {"a": torch.zeros(2, 3, dtype=torch.int8), "b": [torch.tensor(1.0)], "c": "text"}

    structure = get_data_structure(data)
    empty = initialize_tensors(structure)

    assert structure["a"] == TensorInformation(torch.Size([2, 3]), torch.int8)
    assert is_tensor_information(structure["a"])
    assert not is_tensor_information(data["a"])
    assert (empty["a"].shape, empty["a"].dtype) == ((2, 3), torch.int8)
    assert (empty["b"][0].shape, empty["b"][0].dtype) == ((), torch.float32)
    assert structure["c"] == empty["c"] == "text"


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(4, 2),
        [torch.zeros(4)],
        {"a": {"b": (torch.zeros(4),)}},
        {"text": "first", "a": torch.zeros(4)},
        [torch.tensor(1.0), torch.zeros(4)],
        Pair([], torch.zeros(4)),
    ],
)
def test_find_batch_size(data: Any) -> None:
    assert find_batch_size(data) == 4
    assert ignorant_find_batch_size(data) == 4


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "no tensor in the empty list"),
        ({}, ValueError, "no tensor in the empty dict"),
        ({"a": [1]}, TypeError, r"data\['a'\]\[0\] is a int"),
        ("text", TypeError, "data is a str"),
        (torch.tensor(1), ValueError, "every tensor in data is 0-dimensional"),
    ],
)
def test_no_batch_size(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_batch_size(data)
    assert ignorant_find_batch_size(data) is None


def test_find_device() -> None:
    assert find_device({"a": [1, torch.zeros(1, device="meta")]}) == torch.device("meta")
    assert find_device(["text"]) is None


def test_listify() -> None:
    data = {"a": torch.tensor([[1, 2]]), "b": (torch.tensor(True), "text"), "c": torch.ones(1).bfloat16()}

    assert listify(data) == {"a": [[1, 2]], "b": (True, "text"), "c": [1.0]}
    assert listify(torch.ones(1, requires_grad=True)) == [1.0]


def test_slice_tensors() -> None:
    data = {"a": torch.arange(6), "b": [torch.arange(12).view(6, 2)], "c": "text", "d": torch.tensor(7)}

    result = slice_tensors(data, slice(2, 4), process_index=1, num_processes=3)

    assert result["a"].tolist() == [2, 3]
    assert result["b"][0].tolist() == [[4, 5], [6, 7]]
    assert result["c"] == "text"
    assert result["d"].item() == 7


def test_concatenate() -> None:
    data = [
        {"a": torch.ones(1, 2), "b": Pair(torch.zeros(1), [torch.tensor(3)])},
        {"a": torch.zeros(2, 2), "b": Pair(torch.ones(1), [torch.tensor(4)])},
    ]

    result = concatenate(data)

    assert result["a"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert isinstance(result["b"], Pair)
    assert result["b"].x.tolist() == [0, 1]
    assert result["b"].y[0].tolist() == [3, 4]
    assert concatenate([torch.ones(1, 2), torch.ones(1, 1)], dim=1).shape == (1, 3)
    assert type(concatenate((OrderedDict(a=torch.ones(1)),))) is OrderedDict


def test_concatenate_goes_by_key_not_by_position() -> None:
    one, two = torch.tensor([1]), torch.tensor([2])

    result = concatenate([{"a": one, "b": two}, {"b": two, "a": one}])

    assert result["a"].tolist() == [1, 1]
    assert result["b"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "empty sequence"),
        (["x", "y"], TypeError, "there is a str: 'x'"),
        ([torch.ones(1), 5], TypeError, "there is a int: 5"),
        ([[torch.ones(1)], (torch.ones(1),)], ValueError, r"list with \[0\], tuple with \[0\]"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ValueError, r"dict with \['a'\], dict with \['b'\]"),
    ],
)
def test_concatenate_rejects(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        concatenate(data)
