"""gather_for_metrics: every sample exactly once, in the global order, on any number of processes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.accelerator import Accelerator
from accel_data.config import DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def gathered(kind: str, count: int, batch_size: int, split: bool, form: str) -> list:
    dispatch = True if kind == "dispatch" else (False if kind == "iterable" else None)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    )
    dataset = Stream(count) if kind == "iterable" else Numbers(count)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size))
    seen = []
    for batch in loader:
        if form == "tensor":
            seen += accelerator.gather_for_metrics(batch).tolist()
        elif form == "nested":
            result = accelerator.gather_for_metrics({"a": [batch, batch * 2], "b": (batch,)})
            assert (result["a"][0] * 2).tolist() == result["a"][1].tolist()
            seen += result["b"][0].tolist()
        elif form == "objects":
            seen += [int(text) for text in accelerator.gather_for_metrics([str(int(item)) for item in batch])]
        else:
            seen += accelerator.gather_for_metrics(list(batch), use_gather_object=True)
    return [int(item) for item in seen]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["tensor", "nested", "objects", "forced"])
@pytest.mark.parametrize("kind", ["map", "iterable", "dispatch"])
def test_every_sample_once_in_order(world, size, kind, form):
    for count, batch_size, split in [
        (17, 4, False),
        (10, 12, True),
        (3, 2, False),
        (24, 4, False),
        (13, 12, True),
    ]:
        for result in world.run(gathered, kind, count, batch_size, split, form, size=size):
            assert result == list(range(count)), (kind, count, batch_size, split)


def reduced_outputs() -> tuple[list, int, list]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    scalars, odd = [], []
    for batch in loader:
        scalars += accelerator.gather_for_metrics(batch.float().mean()).tolist()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            odd.append(accelerator.gather_for_metrics(torch.zeros(7)).shape[0])
    return scalars, len(caught), odd


def test_outputs_without_a_row_per_sample_are_kept_whole_and_told(world):
    for scalars, warned, odd in world.run(reduced_outputs):
        assert len(scalars) == 4
        assert warned == 1
        assert odd == [14, 14]


def outside_a_loop() -> list:
    accelerator = Accelerator()
    return accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()


def test_outside_of_a_loop_nothing_is_dropped(world):
    assert world.run(outside_a_loop) == [[0, 1], [0, 1]]


def uneven(kind: str, count: int) -> tuple[list, list]:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=kind == "dispatch")
    )
    dataset = Stream(count) if kind == "iterable" else Numbers(count)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    seen, pairs = [], []
    for batch in loader:
        result = accelerator.gather_for_metrics({"x": batch, "pair": (batch.repeat(2), batch.float().mean())})
        seen += result["x"].tolist()
        pairs += result["pair"][0].tolist()
        assert result["pair"][1].shape == (2,)
    return seen, sorted(pairs)


@pytest.mark.parametrize("kind", ["map", "iterable", "dispatch"])
def test_uneven_batches_are_gathered_whole(world, kind):
    for seen, pairs in world.run(uneven, kind, 7):
        assert seen == list(range(7))
        assert pairs == sorted(2 * list(range(7)))


def collated() -> tuple[list, list, list]:
    def collate(items: list[int]) -> tuple:
        return tuple(str(item) for item in items), np.array(items)

    accelerator = Accelerator()
    names, arrays, both = [], [], []
    for name, array in accelerator.prepare(DataLoader(Numbers(5), batch_size=2, collate_fn=collate)):
        names += accelerator.gather_for_metrics(name)
        arrays += accelerator.gather_for_metrics(array)
        both += accelerator.gather_for_metrics(([*array], list(name)), use_gather_object=True)
    return names, np.concatenate(arrays).tolist(), both


def test_padding_is_dropped_from_tuples_arrays_and_structures_of_lists(world):
    for names, numbers, both in world.run(collated):
        assert names == ["0", "1", "2", "3", "4"]
        assert numbers == [0, 1, 2, 3, 4]
        assert both == [[0, 1], ["0", "1"], [2, 3], ["2", "3"], [4], ["4"], [], []]
