from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from accel_ops.collectives.operations import gather
from accel_ops.collectives.padding import (
    CannotPadNestedTensorWarning,
    pad_across_processes,
    pad_input_tensors,
)
from accel_state.process.state import current_process
from accel_world.warned import warns_once


def pad_tree(first: bool) -> tuple:
    rank = current_process().rank
    data = {
        "rows": torch.full((rank + 1, 2), float(rank)),
        "flat": [torch.arange(3 - rank, dtype=torch.uint8)],
        "scalar": torch.tensor(rank),
        "mask": torch.ones(rank + 1, dtype=torch.bool),
    }
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        padded = pad_across_processes(data, pad_index=7, pad_first=first)
    assert list(padded) == list(data)
    return padded, spy.call_count


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_all_tensors_get_the_largest_size_in_one_collective(world, size, first):
    for rank, (padded, collectives) in enumerate(world.run(pad_tree, first, size=size)):
        assert collectives == 1
        fill = [[7.0, 7.0]] * (size - rank - 1)
        own = [[float(rank)] * 2] * (rank + 1)
        assert padded["rows"].tolist() == (fill + own if first else own + fill)
        numbers = list(range(3 - rank))
        assert padded["flat"][0].tolist() == ([7] * rank + numbers if first else numbers + [7] * rank)
        assert padded["flat"][0].dtype is torch.uint8
        assert padded["scalar"].item() == rank
        assert padded["mask"].tolist().count(True) == size  # pad_index is true as a bool


def pad_dims() -> list:
    rank = current_process().rank
    wide = torch.zeros(2, rank + 1)
    same = torch.zeros(2)
    nested = pad_across_processes([wide, same], dim=1)
    assert nested[1] is same
    return [
        tuple(nested[0].shape),
        tuple(pad_across_processes(wide, dim=-1).shape),
        gather(nested[0]).shape[0],
    ]


def test_other_dimensions_and_tensors_without_them(world):
    assert world.run(pad_dims) == [[(2, 2), (2, 2), 4]] * 2


def pad_nested() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype, once per process
        nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with warns_once(CannotPadNestedTensorWarning, "to_padded_tensor"):
        return pad_across_processes(nested) is nested


def test_nested_tensors_come_back_with_a_warning(world):
    assert world.run(pad_nested) == [True, True]


def test_one_process_pads_nothing():
    data = [torch.zeros(2)]

    assert pad_across_processes(data) is data
    with pytest.raises(TypeError, match="pad_across_processes"):
        pad_across_processes(["text"])


def mismatch() -> str:
    rank = current_process().rank
    with pytest.raises(Exception, match="pad_across_processes") as caught:
        pad_across_processes([torch.zeros(2)] * (1 + rank))
    return str(caught.value)


def test_debug_mode_compares_the_trees(world):
    for message in world.run(mismatch, env={"ACCELERATE_DEBUG_MODE": "true"}):
        assert "test_padding.py" in message


def pad_debug() -> list:
    return list(pad_across_processes(torch.zeros(1 + current_process().rank)).shape)


def test_debug_mode_lets_sizes_differ(world):
    assert world.run(pad_debug, env={"ACCELERATE_DEBUG_MODE": "true"}) == [[2], [2]]


@given(batch=st.integers(1, 20), processes=st.integers(1, 8))
def test_the_last_entry_is_repeated_until_the_batch_divides(batch, processes):
    data = {"x": torch.arange(batch), "other": torch.zeros(batch + 1), "wide": torch.zeros(2, batch)}

    padded = pad_input_tensors(data, batch, processes)

    assert len(padded["x"]) % processes == 0
    assert len(padded["x"]) - batch < processes
    assert padded["x"].tolist() == [min(i, batch - 1) for i in range(len(padded["x"]))]
    assert len(padded["other"]) == batch + 1
    assert pad_input_tensors(data, batch, processes, dim=1)["wide"].shape == (2, len(padded["x"]))


def test_impossible_paddings_are_rejected():
    with pytest.raises(ValueError, match="num_processes=0"):
        pad_input_tensors(torch.zeros(2), 2, 0)


def test_one_process_warns_of_nested_tensors_too():
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)

    with pytest.warns(CannotPadNestedTensorWarning, match="to_padded_tensor"):
        assert pad_across_processes(nested) is nested


def test_sparse_tensors_are_rejected_by_name():
    with pytest.raises(TypeError, match=r"moves dense tensors, but data\[1\] is a sparse"):
        pad_across_processes([torch.zeros(1), torch.eye(2).to_sparse()])


def pad_with_gradient() -> list[float]:
    rows = torch.ones(1 + current_process().rank, requires_grad=True)
    pad_across_processes(rows * 2).sum().backward()
    assert rows.grad is not None
    return rows.grad.tolist()


def test_gradients_flow_through_padding(world):
    assert world.run(pad_with_gradient) == [[2], [2, 2]]
