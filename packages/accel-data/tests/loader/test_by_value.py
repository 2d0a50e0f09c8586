"""What workers send as bytes arrives as what torch sends."""

from __future__ import annotations

import os
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from accel_data import prepare_data_loader
from accel_data.loader import by_value
from accel_ops.collectives.pack_parts import as_bytes
from accel_ops.trees.walk import recursively_apply

pytestmark = pytest.mark.usefixtures("fresh_state")

DTYPES = (torch.bfloat16, torch.bool, torch.uint16)
Pair = namedtuple("Pair", "x y")


class Items(Dataset[Any]):
    """Three batches, one in each sample."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(6.0)
        return {
            "dtypes": [torch.tensor([index]).to(dtype) for dtype in DTYPES],
            "complex": torch.tensor(1j * index),
            "float8": torch.full((2,), index).to(torch.float8_e4m3fn),
            "empty": torch.empty(0, 3),
            "nested": ([torch.full((2, 3), index)], ({"a": torch.tensor(index)},)),
            "others": [None, "text", 1.5, [index] * 3],
            "ordered": OrderedDict(a=torch.ones(2)),
            "named": Pair(torch.ones(1), index),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "transposed": whole.view(2, 3).t().contiguous().t(),
        }[self.kind]


def prepared(loader: DataLoader[Any]) -> Any:
    return prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)


def one(items: list[Any]) -> Any:
    (item,) = items
    return item


def received(loader: DataLoader[Any]) -> tuple[list[Any], int]:
    """The batches, and how many tensors came as bytes: torch shares the memory of those that it sends."""
    batches = list(prepared(loader))
    found: list[torch.Tensor] = []
    recursively_apply(found.append, batches)
    return batches, sum(not tensor.is_shared() for tensor in found)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape, one.stride(), one.requires_grad)
        assert same == (other.dtype, other.shape, other.stride(), other.requires_grad)
        assert torch.equal(*(as_bytes(tensor.detach().contiguous()) for tensor in (one, other)))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for item, theirs in zip(one, other, strict=True):
            assert_same(item, theirs)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("dtypes", 3),
        ("complex", 1),
        ("float8", 1),
        ("empty", 1),
        ("nested", 2),
        ("others", 0),
        ("ordered", 0),
        ("named", 0),
        ("parameter", 0),
        ("transposed", 0),
    ],
)
def test_batches_are_those_of_torch(kind: str, tensors: int) -> None:
    loader: DataLoader[Any] = DataLoader(Items(kind), 1, collate_fn=one, num_workers=1)
    batches, count = received(loader)
    assert_same(batches, list(loader))
    assert count == 3 * tensors


def test_the_loader_keeps_its_function_and_its_tensors_their_alignment() -> None:
    loader = prepared(DataLoader(Items("nested"), 1, num_workers=1))
    for batch in loader:
        assert batch[0][0].data_ptr() % 64 == 0
    assert loader.collate_fn is default_collate


def test_the_default_device_is_not_theirs() -> None:
    for kind in ("empty", "nested"):
        batches = iter(prepared(DataLoader(Items(kind), 1, collate_fn=one, num_workers=1)))
        next(batches)  # starts the worker
        with torch.device("meta"):  # where it is received
            batch = next(batches)
        tensor = batch if kind == "empty" else batch[0][0]
        assert tensor.device.type == "cpu"
        list(batches)


class Sized(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.size,), index, dtype=torch.uint8), torch.tensor(index)


@pytest.mark.parametrize(("more", "shared"), [(0, False), (1, True)])
def test_large_batches_are_shared(more: int, shared: bool) -> None:
    data = Sized(by_value.SMALL_BYTES - 8 + more)
    batches, count = received(DataLoader(data, 1, num_workers=1))
    assert [batch[0].is_shared() for batch in batches] == [shared] * 2
    assert count == (0 if shared else 4)
    assert [int(batch[0].max()) for batch in batches] == [0, 1]


def views(items: list[Any]) -> Any:
    whole = torch.zeros(4)
    return whole[:2], whole


def test_what_shares_memory_shares_it_afterwards() -> None:
    for part, whole in prepared(DataLoader(Sized(1), 1, collate_fn=views, num_workers=1)):
        whole.fill_(1)
        assert part.tolist() == [1, 1]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(4)


def test_streams_are_sent_by_value() -> None:
    batches, count = received(DataLoader(Numbers(), 2, num_workers=1))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert count == 2


def test_workers_that_are_not_forked_send_by_value() -> None:
    data: Any = [torch.tensor([number]) for number in range(4)]
    loader: DataLoader[Any] = DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")
    batches, count = received(loader)
    assert [batch.tolist() for batch in batches] == [[[0], [1]], [[2], [3]]]
    assert count == 2


def in_worker(items: list[Any]) -> int:
    assert get_worker_info() is not None
    return os.getpid()


def test_functions_of_the_user_collate_in_the_worker() -> None:
    pids = list(prepared(DataLoader(Sized(1), 1, collate_fn=in_worker, num_workers=1)))
    assert os.getpid() not in pids


def refuse(items: list[Any]) -> Any:
    raise KeyError("no such batch")


def test_errors_are_those_of_the_function() -> None:
    with pytest.raises(KeyError, match="no such batch"):
        list(prepared(DataLoader(Sized(1), 1, collate_fn=refuse, num_workers=1)))
