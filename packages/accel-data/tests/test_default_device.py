"""Loaders under a default device on which nothing can be read: whatever they need is on the CPU."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from accel_data import prepare_data_loader
from accel_world.devices import needs_cuda

pytestmark = pytest.mark.usefixtures("fresh_state")

LENGTH = 23


class Drawing(Sampler):
    """A sampler that draws from the global generator."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(LENGTH, device="cpu"))


def generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda **kwargs: DataLoader(values(), 4, **kwargs),
    "shuffled": lambda **kwargs: DataLoader(values(), 4, shuffle=True, **kwargs),
    "a generator": lambda **kwargs: DataLoader(values(), 4, shuffle=True, generator=generator(), **kwargs),
    "with replacement": lambda **kwargs: DataLoader(
        values(), 4, sampler=RandomSampler(range(LENGTH), replacement=True, generator=generator()), **kwargs
    ),
    "another sampler": lambda **kwargs: DataLoader(values(), 4, sampler=Drawing(), **kwargs),
    "a stream": lambda **kwargs: DataLoader(Stream(), 4, **kwargs),
}


def values():
    return TensorDataset(torch.arange(LENGTH, device="cpu"))


def read(loader):
    """Return the values of two epochs, the second of them resumed in its middle."""
    batches = [batch[0] if isinstance(batch, list) else batch for batch in loader]
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    del iterator
    batches += [batch[0] if isinstance(batch, list) else batch for batch in loader]
    return [value for batch in batches for value in batch.tolist()]


def read_with(device, kind, workers, **kwargs):
    torch.manual_seed(5)
    with torch.device(device):
        return read(prepare_data_loader(LOADERS[kind](num_workers=workers), **kwargs))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_default_device_does_not_matter(kind, workers):
    kwargs = {"num_processes": 2, "process_index": 1, "dispatch_batches": False}
    expected = read_with("cpu", kind, workers, **kwargs)

    assert len(expected) > LENGTH // 2
    assert read_with("meta", kind, workers, **kwargs) == expected


def dispatched(device):
    return [read_with(device, kind, 0, dispatch_batches=True) for kind in ("shuffled", "a stream")]


def test_what_is_handed_out_is_on_the_cpu(world):
    assert world.run(dispatched, "meta") == world.run(dispatched, "cpu")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_shuffled_on_the_cpu_with_cuda_as_default(kind):
    kwargs = {"num_processes": 1, "process_index": 0}
    expected = read_with("cpu", kind, 0, **kwargs)
    torch.set_default_device("cuda")
    try:
        torch.manual_seed(5)
        found = read(prepare_data_loader(LOADERS[kind](), **kwargs))
    finally:
        torch.set_default_device(None)

    assert found == expected


@pytest.mark.gpu
@needs_cuda
def test_a_generator_of_the_gpu_is_drawn_from_there():
    torch.set_default_device("cuda")
    try:
        own = torch.Generator("cuda").manual_seed(3)
        loader = DataLoader(values(), 4, shuffle=True, generator=own)
        seen = read(prepare_data_loader(loader, num_processes=1, process_index=0))
    finally:
        torch.set_default_device(None)

    assert sorted(seen[:LENGTH]) == list(range(LENGTH))
