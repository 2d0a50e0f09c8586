from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from accel_data import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accel_state.gradient import GradientState
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Batches(IterableDataset):
    """A stream of full batches of several sizes."""

    def __iter__(self):
        return iter(torch.arange(17).split([4, 4, 2, 4, 3]))


class Unsized:
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@dataclass
class Example:
    ids: torch.Tensor
    texts: list


def collate(samples):
    width = max(samples) + 1
    ids = torch.tensor([[sample] * width for sample in samples])  # as wide as the batch needs
    return Example(ids, [f"sample {sample}" if sample % 2 else None for sample in samples])


def dispatched(loader, **kwargs):
    return prepare_data_loader(loader, dispatch_batches=True, **kwargs)


def read(loader):
    """Return what this process gets: the batches, the padding, and which is the last one."""
    seen = []
    for batch in loader:
        assert (loader.batch_rows is None) == (loader.real_samples is None)
        if loader.batch_rows:
            process, parts = current_process(), len(loader.batch_rows)
            assert loader.batch_rows[process.rank * parts // process.world_size] == len(batch)
        seen.append((batch.tolist(), loader.real_samples, loader.end_of_dataloader))
    return seen


def like_shards():
    """Compare with loaders that read by themselves, for every kind of loader and option."""
    process = current_process()
    place = {"num_processes": process.world_size, "process_index": process.rank}
    lengths = (0, 1, 7, 12, 13)
    for length, split, even, drop_last in product(lengths, *[(False, True)] * 3):
        size = 2 * process.world_size if split else 2
        makes = [
            lambda: DataLoader(range(length), size, drop_last=drop_last),  # noqa: B023
            lambda: DataLoader(Stream(length), size, drop_last=drop_last),  # noqa: B023
            lambda: DataLoader(range(length), size, drop_last=drop_last, sampler=Unsized(length)),  # noqa: B023,
        ]
        if length:
            makes.append(lambda: DataLoader(range(length), size, drop_last=drop_last, shuffle=True))  # noqa: B023
        for kind, make in enumerate(makes):
            options = {"split_batches": split, "even_batches": even, "data_seed": 2}
            ours = dispatched(make(), **options)
            shards = prepare_data_loader(make(), dispatch_batches=False, **place, **options)
            for _ in range(2):
                got, expected = read(ours), read(shards)
                if not even:  # the last step of some, and not of the others
                    got, expected = ([batch for batch, *_ in seen] for seen in (got, expected))
                assert got == expected, (kind, length, options, drop_last)
            if kind in (0, 3) and (even or drop_last):
                assert len(ours) == len(shards) == len(got)
            assert ours.state_dict() == shards.state_dict()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_get_what_they_would_read_themselves(world, size):
    world.run(like_shards, size=size)


def varying_batches():
    """Hand out batches of a sampler that has no batch size; compare with a loader that reads by itself."""
    process = current_process()
    place = {"num_processes": process.world_size, "process_index": process.rank}
    batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8, 9]]
    for count, even in product(range(1, 6), (True, False)):

        def make():
            return DataLoader(range(10), batch_sampler=batches[:count])  # noqa: B023

        ours = dispatched(make(), even_batches=even)
        shards = prepare_data_loader(make(), dispatch_batches=False, even_batches=even, **place)
        for _ in range(2):
            got, expected = read(ours), read(shards)
            if not even:  # process 0 alone knows which batch is the last one of another
                got, expected = ([batch for batch, *_ in seen] for seen in (got, expected))
            assert got == expected, (count, even)
        if even:
            assert len(got) == -(-count // process.world_size)
            assert len(ours) == len(shards) == len(got)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_unknown_size_are_dispatched_unsplit(world, size):
    world.run(varying_batches, size=size)


def with_workers():
    seen = []
    for data in (range(13), Stream(13)):
        loader = dispatched(DataLoader(data, 2, num_workers=2))
        seen.append(read(loader))
        assert read(loader) == seen[-1]
    return seen


def test_workers_change_nothing(world):
    first, second = world.run(with_workers, size=2)

    assert first[0] == first[1]
    assert [batch for batch, _, _ in first[0]] == [[0, 1], [4, 5], [8, 9], [12, 0]]
    assert second[0][-1] == second[1][-1] == ([1, 2], (1, 0), True)


class Divided(Stream):
    """A stream of which each worker of a loader has its own shard."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers))


def divided_over_workers(split, even):
    """Return the samples that each process gets, and what is known of the last step."""
    loader = dispatched(
        DataLoader(Divided(13), 4 if split else 2, num_workers=2), split_batches=split, even_batches=even
    )
    seen = []
    for batch in loader:
        real = loader.real_samples
        seen += batch.tolist()[: real[current_process().rank] if real else None]
    return seen


@pytest.mark.parametrize(("split", "even"), list(product((False, True), repeat=2)))
def test_a_stream_that_divides_itself_is_handed_out_once(world, split, even):
    first, second = world.run(divided_over_workers, split, even, size=2)

    assert sorted(first + second) == list(range(13))


def objects():
    loader = dispatched(DataLoader(list(range(7)), 2, collate_fn=collate))
    return [(batch.ids.tolist(), batch.texts, loader.real_samples) for batch in loader]


def test_ragged_batches_and_objects_are_handed_out(world):
    first, second = world.run(objects, size=2)

    assert first[0] == ([[0, 0], [1, 1]], [None, "sample 1"], None)
    assert second[0] == ([[2] * 4, [3] * 4], [None, "sample 3"], None)
    assert first[-1][1:] == ([None, "sample 5"], (2, 1))
    assert second[-1][1:] == ([None, None], (2, 1))


def whole_batches(split, even):
    return read(dispatched(DataLoader(Batches(), batch_size=None), split_batches=split, even_batches=even))


@pytest.mark.parametrize(("split", "even"), list(product((False, True), repeat=2)))
def test_whole_batches_are_handed_out(world, split, even):
    results = world.run(whole_batches, split, even, size=2)
    seen = []
    for step in range(max(map(len, results))):
        for rank, result in enumerate(results):
            if step < len(result):
                batch, real, _ = result[step]
                seen += batch[: real[rank] if real else None]

    assert seen == list(range(17))
    if even and split:
        assert [len(batch) for batch, _, _ in results[0]] == [len(batch) for batch, _, _ in results[1]]


class ReadyMade(IterableDataset):
    """A stream of full batches, of which no two have one shape."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            rows, width = number % 3 + 1, number + 1
            names = [f"{number}.{row}" for row in range(rows)]
            yield {"x": torch.full((rows, width), float(number)), "names": names}


class ReadyMadeItems(Dataset):
    """The same with indices."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return list(ReadyMade(self.count))[index]


def ready_made(stream, workers, even):
    """Hand out ready-made batches; compare with a loader that reads by itself."""
    process = current_process()
    place = {"num_processes": process.world_size, "process_index": process.rank}

    def seen(loader):
        return [
            (
                batch["x"].tolist(),
                batch["names"],
                loader.real_samples,
                loader.batch_rows,
                loader.end_of_dataloader,
            )
            for batch in loader
        ]

    for count in range(1, 8):
        if not stream and even and count % process.world_size:
            continue  # a loader that reads by itself rejects these

        def make():
            data = ReadyMade(count) if stream else ReadyMadeItems(count)  # noqa: B023
            return DataLoader(data, batch_size=None, num_workers=workers)

        ours = dispatched(make(), even_batches=even)
        shards = prepare_data_loader(make(), dispatch_batches=False, even_batches=even, **place)
        got, expected = seen(ours), seen(shards)
        if not even:  # the last step of some, and not of the others
            got, expected = ([part[:2] for part in found] for found in (got, expected))
        assert got == expected, count
        assert ours.state_dict() == shards.state_dict()

        resumed = dispatched(make(), even_batches=even)
        for _ in ours:
            resumed.load_state_dict(ours.state_dict())
            break
        rest = seen(resumed)
        if len(got) > 1:  # otherwise it continues with the next epoch
            assert (rest if even else [part[:2] for part in rest]) == got[1:], count


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("stream", "workers"), [(True, 0), (True, 2), (False, 0)])
def test_ready_made_batches_are_those_that_processes_would_read_themselves(world, stream, workers, size):
    for even in (True, False):
        world.run(ready_made, stream, workers, even, size=size)


def whole_items():
    """Read full batches from a dataset with indices."""
    return read(dispatched(DataLoader(torch.arange(6).view(3, 2), batch_size=None)))


def test_whole_batches_of_a_map_style_dataset_are_handed_out(world):
    assert world.run(whole_items, size=2) == [
        [([0, 1], None, False), ([4, 5], (2, 0), True)],
        [([2, 3], None, False), ([0, 1], (2, 0), True)],
    ]


def split_items():
    loader = DataLoader(torch.arange(6).view(2, 3), batch_size=None)
    return read(dispatched(loader, split_batches=True))


def test_whole_batches_of_a_map_style_dataset_are_split(world):
    assert world.run(split_items, size=2) == [
        [([0, 1], (2, 1), False), ([3, 4], (2, 1), True)],
        [([2, 0], (2, 1), False), ([5, 3], (2, 1), True)],
    ]


def bulk():
    sampler = BatchSampler(SequentialSampler(range(10)), 4, False)
    return read(dispatched(DataLoader(torch.arange(10), batch_size=None, sampler=sampler)))


def test_a_sampler_of_batches_is_handed_out(world):
    assert world.run(bulk, size=2) == [
        [([0, 1, 2, 3], None, False), ([8, 9, 0, 1], (2, 0), True)],
        [([4, 5, 6, 7], None, False), ([2, 3, 4, 5], (2, 0), True)],
    ]


def sliced(split, stream):
    calls = []

    def slice_fn(batch, rows, process_index, num_processes):
        calls.append((len(batch), rows.start, rows.stop, process_index, num_processes))
        return batch[rows] + 100

    size = 4 if split else 2
    loader = DataLoader(Stream(7) if stream else range(7), size)
    seen = read(dispatched(loader, split_batches=split, slice_fn_for_dispatch=slice_fn))
    return seen, calls


@pytest.mark.parametrize(("split", "stream"), list(product((False, True), repeat=2)))
def test_a_slicing_function_takes_the_parts(world, split, stream):
    (first, calls), (second, none) = world.run(sliced, split, stream, size=2)

    assert calls == [(4, 0, 2, 0, 2), (4, 2, 4, 1, 2)] * 2
    assert none == []
    assert first == [([100, 101], None, False), ([104, 105], (2, 1), True)]
    # Without split batches it is padded from the start, with them from the step itself.
    assert second == [([102, 103], None, False), ([106, 104 if split else 100], (2, 1), True)]


class Failing(Stream):
    def __iter__(self):
        yield from range(5)
        raise OSError("disk is gone")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this cannot be pickled")


def first_fails(kind):
    loader = {
        "dataset": lambda: DataLoader(Failing(1), 2),
        "collate": lambda: DataLoader(range(9), 2, collate_fn=lambda samples: 1 / 0),
        "pickle": lambda: DataLoader(range(9), 2, collate_fn=lambda samples: {"x": [1, Unpicklable()]}),
        "slice": lambda: DataLoader(range(9), 2),
    }[kind]()
    options = {"slice_fn_for_dispatch": lambda *args, **kwargs: 1 / 0} if kind == "slice" else {}
    ours = dispatched(loader, **options)
    with pytest.raises(Exception) as caught:
        list(ours)
    assert not GradientState().in_dataloader
    dist.barrier()  # the processes still understand each other
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("dataset", "OSError", "disk is gone"),
        ("collate", "ZeroDivisionError", "division by zero"),
        (
            "pickle",
            "TypeError",
            "batch['x'][1] is of type Unpicklable, which cannot be pickled to be sent to another",
        ),
        ("slice", "ZeroDivisionError", "division by zero"),
    ],
)
def test_an_error_of_process_0_reaches_all(world, kind, name, text):
    first, second = world.run(first_fails, kind, size=2)

    assert first[0] == name
    assert first[1].startswith(text)
    assert second[0] == "RuntimeError"
    assert f"Process 0, which reads the data for all processes, failed: {name}: {text}" in second[1]


def leaves_early():
    loader = dispatched(DataLoader(range(12), 2, shuffle=True), data_seed=3)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    state = loader.state_dict()
    rest = dispatched(DataLoader(range(12), 2, shuffle=True), data_seed=3)
    rest.load_state_dict(state)
    return state["consumed"], [*read(loader), *read(rest)], read(skip_first_batches(rest, 2))


def test_an_iteration_may_be_left_and_resumed(world):
    (consumed, first, skipped), (_, second, _) = world.run(leaves_early, size=2)

    assert consumed == 8
    assert len(first) == len(second) == 4
    assert sorted(i for step in (*first[:3], *second[:3]) for i in step[0]) == list(range(12))
    assert len(skipped) == 1


def generators_stay_alike():
    torch.manual_seed(0)
    list(dispatched(DataLoader(range(12), 2, shuffle=True)))
    return torch.rand(1).item()


def test_the_global_generators_stay_equal(world):
    first, second = world.run(generators_stay_alike, size=2)

    assert first == second


def over_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    stream = read(prepare_data_loader(DataLoader(Stream(7), 2), torch_device_mesh=mesh))
    shards = read(prepare_data_loader(DataLoader(range(7), 2), torch_device_mesh=mesh))
    return [batch for batch, _, _ in stream], [batch for batch, _, _ in shards]


def test_processes_of_one_data_rank_get_the_same(world):
    results = world.run(over_a_mesh, size=4)

    assert results[0] == results[1] == ([[0, 1], [4, 5]], [[0, 1], [4, 5]])
    assert results[2] == results[3] == ([[2, 3], [6, 0]], [[2, 3], [6, 0]])


def in_groups(ranks):
    """Prepare as engines do whose groups are in no mesh."""
    process = current_process()
    kwargs = {
        "num_processes": max(ranks) + 1,
        "process_index": ranks[process.rank],
        "data_ranks": ranks,
    }
    torch.manual_seed(process.rank)
    stream = read(prepare_data_loader(DataLoader(Stream(7), 2), **kwargs))
    return stream, read(prepare_data_loader(DataLoader(range(7), 2, shuffle=True), **kwargs))


@pytest.mark.parametrize("ranks", [[0, 0], [0, 1, 0, 1]])
def test_processes_that_no_mesh_puts_in_groups_get_the_same(world, ranks):
    results = world.run(in_groups, ranks, size=len(ranks))

    assert results == [results[ranks.index(share)] for share in ranks]
    seen = [[index for batch, _, _ in stream for index in batch] for stream, _ in results]
    halves = [[0, 1, 4, 5], [2, 3, 6, 0]]
    assert seen == [halves[share] if max(ranks) else list(range(7)) for share in ranks]


def made_uneven():
    loader = dispatched(DataLoader(range(5), 2))
    loader.batch_sampler.even_batches = False
    return [batch for batch, _, _ in read(loader)]


def test_even_batches_can_be_overridden_for_a_while(world):
    assert world.run(made_uneven, size=2) == [[[0, 1], [4]], [[2, 3]]]


def in_debug_mode():
    loader = dispatched(DataLoader(Stream(7), 2))
    assert current_process().debug
    return [batch for batch, _, _ in read(loader)]


def test_steps_are_compared_in_debug_mode(world):
    results = world.run(in_debug_mode, size=2, env={"ACCELERATE_DEBUG_MODE": "true"})

    assert results == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]


def without_a_group():
    loader = dispatched(DataLoader(range(7), 2))
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="there is no process group"):
        next(iter(loader))


def test_a_process_group_is_needed(world):
    world.run(without_a_group, size=2)


def test_an_ignored_slicing_function_is_reported():
    with pytest.warns(UserWarning, match="slice_fn is ignored"):
        DataLoaderDispatcher(Batches(), batch_size=None, slice_fn=lambda *args, **kwargs: None)


def test_alone_a_dispatcher_reads_for_itself():
    loader = DataLoaderDispatcher(Stream(5), batch_size=2)

    assert read(loader) == [([0, 1], None, False), ([2, 3], None, False), ([4], None, True)]
    assert (loader.total_batch_size, loader.batch_size) == (2, 2)
