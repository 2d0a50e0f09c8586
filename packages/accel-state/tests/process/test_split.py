from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.process.split import shard_range, split

lengths = st.integers(0, 40)
sizes = st.integers(1, 7)


def _as_list(inputs: Any) -> list[Any]:
    return inputs.tolist() if hasattr(inputs, "tolist") else list(inputs)


KINDS = {
    "list": list,
    "tuple": tuple,
    "range": lambda numbers: range(len(numbers)),
    "tensor": lambda numbers: torch.tensor(list(numbers), dtype=torch.int64),
    "array": lambda numbers: np.array(list(numbers), dtype=np.int64),
}


@given(lengths, sizes)
def test_shares_partition_the_positions(length: int, size: int) -> None:
    shares = [shard_range(length, rank, size) for rank in range(size)]

    assert [position for one in shares for position in one] == list(range(length))
    counts = [len(one) for one in shares]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(lengths, sizes)
def test_padded_shares_have_one_size(length: int, size: int) -> None:
    shares = [shard_range(length, rank, size, padded=True) for rank in range(size)]

    assert {len(one) for one in shares} == {-(-length // size)}
    assert [position for one in shares for position in one][:length] == list(range(length))


@pytest.mark.parametrize("kind", KINDS)
@given(length=lengths, size=sizes)
def test_all_slices_are_the_inputs(kind: str, length: int, size: int) -> None:
    inputs = KINDS[kind](range(length))
    shares = [split(inputs, rank, size) for rank in range(size)]

    assert [item for one in shares for item in _as_list(one)] == list(range(length))
    assert all(type(one) is type(inputs) for one in shares)
    counts = [len(one) for one in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(1, 40), size=sizes)
def test_padding_repeats_the_last_element_at_the_very_end(kind: str, length: int, size: int) -> None:
    inputs = KINDS[kind](range(length))
    shares = [split(inputs, rank, size, apply_padding=True) for rank in range(size)]
    gathered = [item for one in shares for item in _as_list(one)]

    assert len({len(one) for one in shares}) == 1
    assert gathered[:length] == list(range(length))
    assert set(gathered[length:]) <= {length - 1}
    assert len(gathered) == size * -(-length // size)


@pytest.mark.parametrize("padding", [False, True])
def test_empty_inputs_give_empty_shares(padding: bool) -> None:
    assert [split([], rank, 3, padding) for rank in range(3)] == [[], [], []]
    assert split({}, 1, 3, padding) == {}


def test_documented_example() -> None:
    inputs = ["A", "B", "C"]

    assert [split(inputs, rank, 2) for rank in range(2)] == [["A", "B"], ["C"]]
    assert [split(inputs, rank, 2, apply_padding=True) for rank in range(2)] == [["A", "B"], ["C", "C"]]


def test_dictionary_values_are_split_equally_and_keep_their_types() -> None:
    inputs = OrderedDict(a=[1, 2, 3], b=("x", "y", "z"), c={"inner": torch.arange(6).view(3, 2)})

    second = split(inputs, 1, 2, apply_padding=True)

    assert type(second) is OrderedDict
    assert list(second) == ["a", "b", "c"]
    assert (second["a"], second["b"]) == ([3, 3], ("z", "z"))
    assert second["c"]["inner"].tolist() == [[4, 5], [4, 5]]


@pytest.mark.parametrize("inputs", [defaultdict(list, a=[1, 2, 3]), UserDict(a=[1, 2, 3])])
def test_other_mappings_keep_their_type(inputs: Any) -> None:
    first = split(inputs, 0, 2)

    assert type(first) is type(inputs)
    assert dict(first) == {"a": [1, 2]}
    assert dict(inputs) == {"a": [1, 2, 3]}


def test_one_process_gets_the_inputs_themselves() -> None:
    inputs = {"a": [1, 2]}

    assert split(inputs, 0, 1) is inputs


def test_unpadded_tensor_is_not_copied() -> None:
    inputs = torch.arange(10)

    assert split(inputs, 1, 2).data_ptr() == inputs[5:].data_ptr()


def test_dataset_selects_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    # The smallest thing with the interface of datasets.Dataset; the library itself is no dependency.
    class Dataset:
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def __len__(self) -> int:
            return len(self.items)

        def select(self, positions: Any) -> Dataset:
            if isinstance(positions, range) and positions.start >= len(self):  # also where it is empty
                raise IndexError(f"Index {positions.start} out of range for dataset of size {len(self)}.")
            return Dataset([self.items[position] for position in positions])

    module = ModuleType("datasets")
    module.Dataset = Dataset
    monkeypatch.setitem(sys.modules, "datasets", module)

    inputs = Dataset([10, 11, 12, 13, 14])

    assert [split(inputs, rank, 2).items for rank in range(2)] == [[10, 11, 12], [13, 14]]
    assert split(inputs, 1, 2, apply_padding=True).items == [13, 14, 14]
    assert [split(Dataset([10]), rank, 3).items for rank in range(3)] == [[10], [], []]
    assert split(Dataset([]), 1, 2, apply_padding=True).items == []


def test_uneven_dictionary_is_rejected_with_its_lengths() -> None:
    with pytest.raises(ValueError, match=r"inputs\['a'\]: 2, inputs\['b'\]: 3.*split them one by one"):
        split({"a": [1, 2], "b": [1, 2, 3]}, 0, 2)


def test_uneven_dictionary_is_rejected_on_one_process_too() -> None:
    with pytest.raises(ValueError, match="one length"):
        split({"a": [1, 2], "b": [1, 2, 3]}, 0, 1)


@pytest.mark.parametrize("inputs", ["a prompt", 7, {1, 2}, {"a": "text"}])
def test_other_types_are_rejected(inputs: Any) -> None:
    with pytest.raises(TypeError, match=r"is of type (str|int|set).*allowed: list"):
        split(inputs, 0, 2)


def test_tensor_without_dimensions_is_rejected() -> None:
    with pytest.raises(ValueError, match="unsqueeze"):
        split(torch.tensor(1), 0, 2)
