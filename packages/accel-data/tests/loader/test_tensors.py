"""A prepared loader over a TensorDataset gives what torch gives, with one call for each tensor."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from accel_data import prepare_data_loader

pytestmark = pytest.mark.usefixtures("fresh_state")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16]
ROWS = 11


def random(shape, dtype):
    tensor = torch.randint(0, 2 if dtype == torch.bool else 100, (ROWS, *shape))
    return tensor.to(dtype)


def prepared(loader, **kwargs):
    return prepare_data_loader(loader, num_processes=1, process_index=0, **kwargs)


def assert_same(batches, expected):
    batches, expected = list(batches), list(expected)
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert type(batch) is type(other) is list
        for tensor, theirs in zip(batch, other, strict=True):
            assert (tensor.dtype, tensor.stride()) == (theirs.dtype, theirs.stride())
            assert tensor.requires_grad == theirs.requires_grad
            assert torch.equal(tensor, theirs)


def reads(loader):
    """Number of samples that an epoch reads one by one."""
    with mock.patch.object(TensorDataset, "__getitem__", autospec=True) as read:
        read.side_effect = lambda data, index: tuple(tensor[index] for tensor in data.tensors)
        list(loader)
    return read.call_count


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(max_examples=50, deadline=None)
@given(
    kinds=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3),
    batch_size=st.integers(1, 12),
    indices=st.lists(st.integers(-ROWS, ROWS - 1), max_size=20),
)
def test_batches_are_those_of_torch(kinds, batch_size, indices):
    data = TensorDataset(*(random(*kind) for kind in kinds))
    plain = DataLoader(data, batch_size, sampler=indices)

    loader = prepared(plain)

    assert_same(loader, plain)
    assert loader.dataset is data
    assert loader.collate_fn is default_collate


def test_no_sample_is_read_by_itself():
    data = TensorDataset(random((2,), torch.float32), random((), torch.int64))
    loader = prepared(DataLoader(data, 4, shuffle=True))

    assert reads(loader) == 0
    assert reads(prepared(DataLoader(data, 4, sampler=[0, -1]))) == 2


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor * 2 for tensor in super().__getitem__(index))


def tensors(kind):
    tensor = torch.randn(ROWS, 2, 3, 4)
    return {
        "channels last": lambda: tensor.to(memory_format=torch.channels_last),
        "gradient": lambda: tensor.requires_grad_(),
        "parameter": lambda: torch.nn.Parameter(tensor),
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "negative": lambda: torch._neg_view(tensor),
        "doubled": lambda: tensor,
    }[kind]()


@pytest.mark.parametrize("kind", ["channels last", "gradient", "parameter", "negative", "doubled"])
def test_other_tensors_and_datasets_are_read_as_before(kind):
    data = (Doubled if kind == "doubled" else TensorDataset)(tensors(kind))
    plain = DataLoader(data, 4)

    assert_same(prepared(plain), plain)
    assert reads(prepared(plain)) == ROWS


def test_what_cannot_be_indexed_is_read_as_before():
    data = TensorDataset(tensors("float8"))

    for batch, other in zip(prepared(DataLoader(data, 4)), DataLoader(data, 4), strict=True):
        assert torch.equal(batch[0].view(torch.uint8), other[0].view(torch.uint8))


def test_functions_of_the_user_collate():
    data = TensorDataset(random((2,), torch.float32))
    loader = prepared(DataLoader(data, 4, collate_fn=len))
    assert list(loader) == [4, 4, 3]

    def negated(batch, *, collate_fn_map=None):
        return -collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    with mock.patch.dict(default_collate_fn_map, {torch.Tensor: negated}):
        assert_same(prepared(DataLoader(data, 4)), DataLoader(data, 4))


def test_single_samples_subsets_and_workers_are_as_in_torch():
    data = TensorDataset(random((2,), torch.float32), random((), torch.int64))

    for one, other in zip(prepared(DataLoader(data, None)), data, strict=True):
        assert all(map(torch.equal, one, other))
    subset = DataLoader(Subset(data, [3, 1]), 4)
    assert_same(prepared(subset), subset)
    with_workers = DataLoader(data, 4, num_workers=1)
    assert_same(prepared(with_workers), with_workers)


def asks_for_the_dataset(worker_id):
    assert type(torch.utils.data.get_worker_info().dataset) is TensorDataset


def test_workers_read_no_sample_by_itself_unless_a_function_of_the_user_sees_the_dataset():
    data = TensorDataset(random((2,), torch.float32), random((), torch.int64))

    watched = DataLoader(data, 4, num_workers=1, worker_init_fn=asks_for_the_dataset)
    assert_same(prepared(watched), watched)

    # The workers are forked with it.
    fork = {"num_workers": 1, "multiprocessing_context": "fork"}
    watched = DataLoader(data, 4, worker_init_fn=asks_for_the_dataset, **fork)
    with mock.patch.object(TensorDataset, "__getitem__", side_effect=KeyError("a sample was read")):
        assert len(list(prepared(DataLoader(data, 4, shuffle=True, **fork)))) == 3
        with pytest.raises(KeyError, match="a sample was read"):
            list(prepared(watched))


def test_an_index_beyond_the_end_raises_as_in_torch():
    data = TensorDataset(random((2,), torch.float32))

    with pytest.raises(IndexError, match="index 11 is out of bounds for dimension 0 with size 11"):
        list(prepared(DataLoader(data, 4, sampler=[0, 11])))


def test_batches_have_memory_of_their_own():
    data = TensorDataset(torch.zeros(4, 2))
    for (batch,) in prepared(DataLoader(data, 4)):
        batch.fill_(1)

    assert not data.tensors[0].any()


def test_tensors_that_are_replaced_between_batches_are_read():
    data = TensorDataset(torch.zeros(4))
    batches = iter(prepared(DataLoader(data, 2)))
    next(batches)
    data.tensors = (torch.ones(4),)

    assert next(batches)[0].tolist() == [1, 1]


def test_the_default_device_is_not_that_of_indices():
    with torch.device("meta"):
        (batch,) = prepared(DataLoader(TensorDataset(torch.arange(4, device="cpu")), 4))

    assert batch[0].tolist() == [0, 1, 2, 3]
