"""gather_for_metrics: every sample exactly once, in the global order, on any number of processes."""

from __future__ import annotations

import random
import warnings
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel.accelerator import Accelerator
from accel.training.metrics import gather_for_metrics
from accel_data.config import DataLoaderConfiguration
from accel_state.open_loaders import OpenLoaders
from accel_state.parallelism.config import ParallelismConfig
from accel_world.warned import warns_once

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


LOADERS = [(17, 4, False), (10, 12, True), (3, 2, False), (24, 4, False), (13, 12, True)]
"""Samples, batch size, and whether the batches are split."""


def gathered_from_each(kind: str, form: str) -> list[list]:
    return [gathered(kind, *loader, form) for loader in LOADERS]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["tensor", "nested", "objects", "forced"])
@pytest.mark.parametrize("kind", ["map", "iterable", "dispatch"])
def test_every_sample_once_in_order(world, size, kind, form):
    for results in world.run(gathered_from_each, kind, form, size=size):
        for loader, result in zip(LOADERS, results, strict=True):
            assert result == list(range(loader[0])), (kind, loader)


def repeated() -> list:
    accelerator = Accelerator()
    sampler = [index for index in range(4) for _ in range(4)]  # as trl's GRPO repeats its prompts
    loader = accelerator.prepare(DataLoader(Numbers(4), batch_size=4, sampler=sampler))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def test_a_sampler_longer_than_its_dataset_loses_nothing(world):
    assert world.run(repeated) == [[[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]] * 2


def reduced_outputs() -> tuple[list, list, list]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    scalars, odd, told = [], [], []
    for batch in loader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scalars += accelerator.gather_for_metrics(batch.float().mean()).tolist()
            odd.append(accelerator.gather_for_metrics(torch.zeros(7)).shape[0])
        told.append([str(warning.message)[:32] for warning in caught])
    return scalars, odd, told


def test_outputs_without_a_row_per_sample_are_kept_whole_and_reported(world):
    for rank, (scalars, odd, told) in enumerate(world.run(reduced_outputs)):
        assert len(scalars) == 4
        assert odd == [14, 14]
        rows = ["gather_for_metrics got 2 rows fro", "gather_for_metrics got 14 rows fr"]
        assert told == [[], [text[:32] for text in rows] if rank == 0 else []]


def gathered_after_the_loop(kind: str, count: int, batch_size: int, split: bool) -> list[list[int]]:
    dispatch = True if kind == "dispatch" else (False if kind == "iterable" else None)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    )
    dataset = Stream(count) if kind == "iterable" else Numbers(count)
    loader, other = accelerator.prepare(
        DataLoader(dataset, batch_size=batch_size),
        DataLoader(Numbers(60), batch_size=10 * accelerator.num_processes),
    )
    found = []
    for _ in range(2):
        batches = list(loader)
        epoch = torch.cat(batches)
        results = [accelerator.gather_for_metrics({"a": epoch, "b": epoch * 2})["b"] // 2]
        results.append(accelerator.gather_for_metrics([int(item) for item in epoch], use_gather_object=True))
        results.append(accelerator.gather_for_metrics(epoch, loader=loader))
        # Inside of a loop over another one, and later, by name.
        for step, _ in enumerate(other):
            if step == 0:
                results.append(accelerator.gather_for_metrics(torch.cat(list(loader))))
        results.append(accelerator.gather_for_metrics(epoch, loader=loader))
        found += [sorted(map(int, result)) for result in results]
    found.append(list(map(int, accelerator.gather_for_metrics(next(iter(loader))))))
    return found


def gathered_after_each_loop(kind: str) -> list:
    return [gathered_after_the_loop(kind, *loader) for loader in LOADERS]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["map", "iterable", "dispatch"])
def test_what_was_collected_over_the_epoch_has_every_sample_once(world, size, kind):
    for results in world.run(gathered_after_each_loop, kind, size=size):
        for (count, batch_size, split), found in zip(LOADERS, results, strict=True):
            *epochs, first = found
            assert epochs == [list(range(count))] * 10, (kind, count, batch_size)
            assert first == list(range(min(count, batch_size if split else batch_size * size)))


def gathered_beside_an_ended_loop(own_batches: bool) -> list[int]:
    """Gather as many rows as the last batch of an ended loop has, which are of something else."""
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    evaluation = accelerator.prepare(DataLoader(Numbers(9), batch_size=3))
    batches = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    options = {"batch_sampler": batches} if own_batches else {"batch_size": 3}
    found = []
    for batch in accelerator.prepare(DataLoader(Numbers(12), **options)):
        for inner in evaluation:
            accelerator.gather_for_metrics(inner)
        found += accelerator.gather_for_metrics(batch).tolist()
    for inner in evaluation:
        accelerator.gather_for_metrics(inner)
    # The loop has dropped the padding: nothing is told of what comes after it.
    found += accelerator.gather_for_metrics(torch.arange(3)).tolist()
    return found + accelerator.gather_for_metrics(torch.tensor(7)).tolist()


@pytest.mark.parametrize("own_batches", [False, True])
def test_rows_that_are_as_many_as_the_last_batch_of_an_ended_loop_are_kept(world, own_batches):
    expected = [*range(12), 0, 1, 2, 0, 1, 2, 7, 7]
    assert world.run(gathered_beside_an_ended_loop, own_batches) == [expected] * 2


def gathered_after_an_uneven_loop(batches: list[list[int]]) -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_sampler=batches))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This loader gives 2 batches to process 0, but only 1")
        epoch = torch.cat(list(loader))
    mean = accelerator.gather_for_metrics(epoch.float().mean())  # no padding, no warning
    assert len(mean) == 2
    return sorted(accelerator.gather_for_metrics(epoch).tolist())


@pytest.mark.parametrize("batches", [[[0, 1, 2], [3, 4], [5]], [[0], [1, 2, 3], [4, 5], [6]]])
def test_an_epoch_without_padding_is_gathered_in_full(world, batches):
    expected = [index for batch in batches for index in batch]
    assert world.run(gathered_after_an_uneven_loop, batches) == [expected] * 2


def counted_after_the_loop() -> list[list[int]]:
    """What a loop counts by itself has the padding in it: 12 samples of 9."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1)).eval()
    loader = accelerator.prepare(DataLoader(Numbers(9), batch_size=3))
    results = []
    total = sum(len(batch) for batch in loader)
    with warns_once(UserWarning, "last step repeats 3 samples") as first:
        results += [accelerator.reduce(torch.tensor([total])).item() for _ in range(2)]
    for batch in loader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.reduce(torch.tensor(len(batch)))
        results.append(len(caught))
    for _ in loader:
        pass
    with warns_once(UserWarning, "got 2 rows from 2 processes, and there are samples that only") as second:
        accelerator.gather_for_metrics(torch.tensor(total))
    # In a step of training that evaluates, what was counted is told, and not what is trained on.
    for step, _ in enumerate(accelerator.prepare(DataLoader(Numbers(12), batch_size=2))):
        if step == 0:
            for _ in loader:
                pass
            with warns_once(UserWarning, "got 2 rows from 2 processes") as third:
                accelerator.gather_for_metrics(torch.tensor(total))
            model.train()
            accelerator.gather_for_metrics(torch.tensor(0.5))
            model.eval()
    # Neither in training, nor where the padding was dropped, nor where there is none.
    model.train()
    for _ in loader:
        pass
    accelerator.reduce(torch.tensor(1))
    model.eval()
    correct = sum(len(accelerator.gather_for_metrics(batch)) for batch in loader)
    accelerator.reduce(torch.tensor(1))
    for _ in accelerator.prepare(DataLoader(Numbers(8), batch_size=2)):
        pass
    accelerator.reduce(torch.tensor(1))
    accelerator.gather_for_metrics(torch.tensor(1))
    return [results, [len(first), len(second), len(third), correct]]


def test_padding_that_a_loop_counts_itself_is_reported(world):
    for rank, (results, told) in enumerate(world.run(counted_after_the_loop)):
        assert results == [12, 12, 0, int(rank == 0)]
        assert told == [int(rank == 0)] * 3 + [9]


def gathered_side_by_side(counts: tuple[int, int], named: bool) -> tuple[list, list, list]:
    accelerator = Accelerator()
    loaders = accelerator.prepare(*(DataLoader(Numbers(count), batch_size=size) for count, size in counts))
    found, told = ([], []), []
    for batches in zip(*loaders, strict=False):
        for batch, loader, seen in zip(batches, loaders, found, strict=True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options = {"loader": loader} if named else {}
                seen += accelerator.gather_for_metrics(batch, **options).tolist()
                names = accelerator.gather_for_metrics([str(int(item)) for item in batch], **options)
                assert list(map(int, names)) == seen[len(seen) - len(names) :]
            told += [str(warning.message) for warning in caught]
    return *found, told


def test_the_batch_of_each_of_two_loaders_is_cut_by_its_own_padding(world):
    # The rows of a batch tell whose it is.
    for first, second, told in world.run(gathered_side_by_side, ((11, 3), (7, 2)), False):
        assert (first, second, told) == (list(range(11)), list(range(7)), [])
    # They do not where they are equally many: it has to be said.
    for first, second, told in world.run(gathered_side_by_side, ((11, 3), (12, 3)), True):
        assert (first, second, told) == (list(range(11)), list(range(12)), [])
    for rank, (_, second, told) in enumerate(world.run(gathered_side_by_side, ((12, 3), (11, 3)), False)):
        assert second == list(range(11))
        assert all("read side by side" in text for text in told)
        assert bool(told) == (rank == 0)


def wrong_loaders() -> list[str]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    messages = []
    for wrong in (DataLoader(Numbers(5)), loader):
        with pytest.raises((TypeError, ValueError)) as error:
            accelerator.gather_for_metrics(torch.zeros(2), loader=wrong)
        messages.append(str(error.value))
    return messages


def test_a_loader_that_cannot_be_meant_is_rejected():
    plain, unread = wrong_loaders()
    assert plain.startswith("gather_for_metrics(loader=...) got a DataLoader. Pass the loader that prepare()")
    assert "got the DataLoaderShard over Numbers (length 3), which was not iterated" in unread


def outside_a_loop() -> list:
    accelerator = Accelerator()
    return accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()


def test_outside_of_a_loop_nothing_is_dropped(world):
    assert world.run(outside_a_loop) == [[0, 1], [0, 1]]


def maybe_told(loader, told: bool):
    """Begin to iterate a loader, which tells that it may be uneven where it cannot know."""
    batches = iter(loader)
    if told:
        with warns_once(UserWarning, "may give some processes fewer batches"):
            yield next(batches)
    yield from batches


def uneven(kind: str, count: int) -> tuple[list, list]:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=kind == "dispatch")
    )
    dataset = Stream(count) if kind == "iterable" else Numbers(count)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
    seen, pairs = [], []
    for batch in maybe_told(loader, kind == "iterable"):
        result = accelerator.gather_for_metrics({"x": batch, "pair": (batch.repeat(2), batch.float().mean())})
        seen += result["x"].tolist()
        pairs += result["pair"][0].tolist()
        assert result["pair"][1].shape == (2,)
    return seen, sorted(pairs)


@pytest.mark.parametrize("kind", ["map", "iterable", "dispatch"])
def test_uneven_batches_are_gathered_in_full(world, kind):
    for seen, pairs in world.run(uneven, kind, 7):
        assert seen == list(range(7))
        assert pairs == sorted(2 * list(range(7)))


def gathered_from_varying_batches(dispatch: bool) -> list[tuple[list[int], list[int], int]]:
    """Gather over batch samplers without a batch size, with 1 to 5 batches of several sizes."""
    batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9]]
    found = []
    for count in range(1, 6):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        loader = accelerator.prepare(DataLoader(Numbers(10), batch_sampler=batches[:count]))
        tensors, objects, steps = [], [], 0
        for batch in loader:
            tensors += accelerator.gather_for_metrics({"x": [batch]})["x"][0].tolist()
            objects += [int(text) for text in accelerator.gather_for_metrics([str(int(i)) for i in batch])]
            steps += 1
        found.append((tensors, objects, steps))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_without_a_size_count_once_although_the_last_step_is_filled(world, dispatch, size):
    for results in world.run(gathered_from_varying_batches, dispatch, size=size):
        for count, (tensors, objects, steps) in enumerate(results, 1):
            assert tensors == objects == list(range([1, 4, 6, 7, 10][count - 1]))
            assert steps == -(-count // size)


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


class ReadyMade(IterableDataset):
    """A stream of full batches, each of another shape."""

    def __iter__(self):
        start = 0
        for number, rows in enumerate([2, 1, 3, 1, 2]):
            yield torch.arange(start, start + rows).unsqueeze(1).expand(rows, number + 1)
            start += rows


def gathered_from_ready_made_batches(dispatch: bool) -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(ReadyMade(), batch_size=None))
    return [row for batch in loader for row in accelerator.gather_for_metrics(batch[:, 0]).tolist()]


@pytest.mark.parametrize("dispatch", [False, True])
def test_samples_of_ready_made_batches_count_once(world, dispatch):
    for seen in world.run(gathered_from_ready_made_batches, dispatch, size=2):
        assert seen == list(range(9))


class SelfSharded(Stream):
    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), self.count, torch.distributed.get_world_size()))


def gathered_from_shards() -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(presharded=True))
    loader = accelerator.prepare(DataLoader(SelfSharded(12), batch_size=2))
    return [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]


def test_samples_of_a_stream_that_shards_itself_count_once(world):
    for seen in world.run(gathered_from_shards, size=2):
        assert sorted(seen) == list(range(12))


def test_padding_is_dropped_from_tuples_arrays_and_structures_of_lists(world):
    for names, numbers, both in world.run(collated):
        assert names == ["0", "1", "2", "3", "4"]
        assert numbers == [0, 1, 2, 3, 4]
        assert both == [[0, 1], ["0", "1"], [2, 3], ["2", "3"], [4], ["4"], [], []]


class Part(IterableDataset):
    """The samples of one process, every size-th."""

    def __init__(self, count: int, rank: int, size: int) -> None:
        self.count = count
        self.rank, self.num_replicas = rank, size

    def __iter__(self):
        return iter(range(self.rank, self.count, self.num_replicas))


@dataclass
class Output:
    index: torch.Tensor
    name: list


Pair = namedtuple("Pair", ["index", "twice"])


def make_loader(case: dict, accelerator: Accelerator) -> DataLoader:
    count, rank, size = case["count"], accelerator.process_index, accelerator.num_processes
    options = {
        "batch_size": case["batch_size"],
        "drop_last": case["drop_last"],
        "num_workers": case["workers"],
    }
    if case["kind"] == "sampler":
        sampler = DistributedSampler(range(count), size, rank, shuffle=False)
        return DataLoader(Numbers(count), sampler=sampler, **options)
    if case["kind"] == "part":
        return DataLoader(Part(count, rank, size) if size > 1 else Stream(count), **options)
    if "stream" in case["kind"]:
        return DataLoader(Stream(count), **options)
    return DataLoader(Numbers(count), **options)


def collected(case: dict) -> list[list[int]]:
    """Iterate a loader; return what is gathered of tensors, of structures, and of objects."""
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(
            split_batches=case["split"], dispatch_batches="dispatched" in case["kind"]
        )
    )
    tensors, nested, fields, objects = [], [], [], []
    for batch in accelerator.prepare(make_loader(case, accelerator)):
        gather = accelerator.gather_for_metrics
        tensors += gather(batch).tolist()
        inner = gather({"x": [batch, (batch.float() / 2,)], "pair": Pair(batch, 2 * batch)})
        assert (inner["x"][1][0] * 2).tolist() == inner["x"][0].tolist() == inner["pair"].index.tolist()
        nested += (inner["pair"].twice // 2).tolist()
        for output in gather(Output(batch, [str(int(i)) for i in batch])):
            assert [int(name) for name in output.name] == output.index.tolist()
            fields += output.index.tolist()
        objects += [int(text) for text in gather([str(int(index)) for index in batch])]
    return [tensors, nested, fields, objects]


def collected_all(cases: list[dict]) -> list[list[list[int]]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "split_batches=True is ignored")
        warnings.filterwarnings("ignore", "This loader may give some processes fewer batches")
        return [collected(case) for case in cases]


def expected_samples(case: dict, size: int) -> tuple[list[int], list[int]]:
    """Return the samples, all and in order, and the order in which a part that was dealt out comes."""
    count, batch_size, dealt = case["count"], case["batch_size"], case["kind"] in ("sampler", "part")
    group = batch_size if case["split"] and not dealt else batch_size * size
    kept = count - count % group if case["drop_last"] else count
    if dealt:
        steps = range(0, kept, group)
        order = [i for s in steps for r in range(size) for i in range(s + r, min(s + group, kept), size)]
        return list(range(kept)), order
    return list(range(kept)), list(range(kept))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sample_comes_once_in_the_global_order_from_any_loader(world, size):
    draw = random.Random(size)
    kinds = ["map", "stream", "dispatched map", "dispatched stream", "sampler", "part"]
    cases = []
    for kind in kinds:
        for _ in range(6):
            split = draw.random() < 0.4
            cases.append(
                {
                    "kind": kind,
                    "split": split,
                    "batch_size": draw.randint(1, 4) * (size if split else 1),
                    "count": draw.randint(1, 30),
                    "drop_last": draw.random() < 0.25 and kind not in ("sampler", "part"),
                    "workers": 0,
                }
            )
            if kind == "part":  # every process must have as many batches: nothing can be padded
                cases[-1]["count"] = size * cases[-1]["batch_size"] * draw.randint(0, 3) + size
        cases.append({**cases[-1], "workers": 2})
    for result in world.run(collected_all, cases, size=size, timeout_s=100):
        for case, (tensors, nested, fields, objects) in zip(cases, result, strict=True):
            everything, order = expected_samples(case, size)
            assert tensors == order, case
            assert nested == fields == objects == tensors, case
            assert sorted(tensors) == everything, case


def collected_in_groups(case: dict) -> tuple[list[int], list[int], list[int]]:
    """Gather over a loader on 4 processes, of which two and two see the same samples."""
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2),
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches="dispatched" in case["kind"],
            split_batches=case["split"],
            even_batches=case["even"],
        ),
    )
    loader = accelerator.prepare(make_loader(case, accelerator))
    own, tensors, objects = [], [], []
    for batch in loader:
        own += batch.tolist()
        inner = accelerator.gather_for_metrics({"x": (batch, [2 * batch])})
        assert inner["x"][1][0].tolist() == [2 * index for index in inner["x"][0].tolist()]
        tensors += inner["x"][0].tolist()
        objects += [int(text) for text in accelerator.gather_for_metrics([str(int(i)) for i in batch])]
    return own, tensors, objects


def collected_in_groups_all(cases: list[dict]) -> list[tuple[list[int], list[int], list[int]]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This loader (may give|gives) some processes fewer batches")
        return [collected_in_groups(case) for case in cases]


def test_processes_of_a_tensor_parallel_group_count_once(world):
    common = {"drop_last": False, "workers": 0, "even": True}
    cases = [
        {**common, "kind": kind, "split": split, "count": count, "batch_size": 4 if split else 2}
        for kind in ("map", "stream", "dispatched map", "dispatched stream")
        for split in (False, True)
        for count in (1, 7, 8)
    ]
    cases += [{**case, "even": False} for case in cases if case["count"] == 7]  # 4 and 3 samples
    results = world.run(collected_in_groups_all, cases, size=4)
    for case, *found in zip(cases, *results, strict=True):
        for _, tensors, objects in found:
            assert tensors == objects == list(range(case["count"])), case
        own = [samples for samples, _, _ in found]
        assert own[::2] == own[1::2], case
        assert case["count"] == 1 or own[0] != own[2], case


class Walked(BatchSampler):
    """One whose batches are its own, not cut from those of its sampler."""

    def __iter__(self):
        return iter([[6, 1, 2], [3, 4, 5], [0]])


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("kind", [BatchSampler, Walked])
def test_rows_of_a_whole_batch_are_cut_in_an_incomplete_last_one(kind: type[BatchSampler]):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(7), batch_sampler=kind(range(7), 3, False)))

    whole = [accelerator.gather_for_metrics(torch.tensor(0.5).repeat(3)).shape[0] for _ in loader]
    other = [accelerator.gather_for_metrics(torch.zeros(5)).shape[0] for _ in loader]

    per_class = torch.tensor([0.5, 0.2, 0.1])
    kept = [accelerator.gather_for_metrics(per_class).shape[0] for _ in loader]

    assert whole == [3, 3, 1]  # the mean weighs each sample equally
    assert kept == [3, 3, 3]
    assert other == [5, 5, 5]
    assert accelerator.gather_for_metrics(torch.zeros(3)).shape[0] == 3  # after the loop


class Padded:
    """What a loader says of a batch of 2 samples on one process, of which one is real."""

    real_samples, batch_rows = (1,), (2,)


def cut(data, **options):
    loaders, loader = OpenLoaders(), Padded()
    loaders.begin(loader)
    loaders.record_batch(loader)
    process = Accelerator().process
    return gather_for_metrics(data, passes=loaders.current, process=process, shard=(0, 1), **options)


def test_a_list_of_two_in_a_batch_of_two():
    one, two = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 2])

    def lists(data):
        return [value.tolist() if hasattr(value, "tolist") else value for value in data]

    # Tensors have a row per sample, in lists too.
    assert lists(cut([one, two])) == [[[1.0, 2.0]], [1]]
    # Entries that differ in kind cannot be samples.
    assert lists(cut([one, ["a", "b"]])) == [[[1.0, 2.0]], ["a"]]
    assert lists(cut([one, two], use_gather_object=True)) == [[[1.0, 2.0]], [1]]
    assert lists(cut([[1, 2], ["a", "b"]])) == [[1], ["a"]]
    assert lists(cut((["c", "d"], ["a", "b"]))) == [["c"], ["a"]]
    # Entries with other numbers of rows are samples.
    assert cut([["c", "d"], ["a"]]) == [["c", "d"]]
    assert cut(["c", "d"]) == ["c"]
    # What has no rows, next to tensors that have them, is no sample.
    for other in (None, "text", 0.5, {"name": ["a", "b"]}, torch.tensor(0.5)):
        for data in ((one, other), (other, one), {"a": (one, other)}):
            found = cut(data, use_gather_object=True)
            found = found[0]["a"] if isinstance(data, dict) else found
            assert [value.tolist() for value in found if getattr(value, "ndim", 0) == 2] == [[[1.0, 2.0]]]
            assert len(found) == 2
    # The tokens of two samples, or a sample that lacks them.
    assert cut(([1, 2], [1])) == [[1, 2]]
    assert lists(cut((two, torch.tensor([1])), use_gather_object=True)) == [[1, 2]]
    # Where both could be meant it is told what is done.
    for data in ([["c", "d"], ["a", "b"]], [two.numpy(), two.numpy()]):
        with pytest.warns(UserWarning, match="taken for one entry per sample.*pass a tuple or a dict"):
            (first,) = cut(data)
        assert list(first) == list(data[0])
