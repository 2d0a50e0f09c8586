"""Datasets of Hugging Face `datasets`, map-style and streams, through prepared loaders."""

from __future__ import annotations

import warnings

import pytest
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.utils import DataLoaderConfiguration
from accel_data import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accel_state.process.state import current_process

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_state")]

LENGTH = 46
BATCH_SIZE = 3


def table(count: int = LENGTH) -> Dataset:
    return Dataset.from_dict({"i": list(range(count)), "text": [f"row {i}" for i in range(count)]})


def stream(variant: str = "plain"):
    data = table().to_iterable_dataset(num_shards=4)
    return {
        "plain": lambda: data,
        "torch": lambda: data.with_format("torch"),
        "mapped": lambda: data.map(lambda row: {"twice": 2 * row["i"]}).with_format("torch"),
        "batched": lambda: data.map(
            lambda rows: {"twice": [2 * i for i in rows["i"]]}, batched=True, batch_size=7
        ),
        "filtered": lambda: data.filter(lambda row: row["i"] % 3 < 2),
        "shuffled": lambda: data.shuffle(seed=5, buffer_size=8),
    }[variant]()


VARIANTS = ["batched", "filtered", "mapped", "plain", "shuffled", "torch"]


def prepared(data, dispatch=None, workers=0, **kwargs):
    config = DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=2, even_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    loader = DataLoader(data, BATCH_SIZE, num_workers=workers, **kwargs)
    return accelerator, accelerator.prepare(loader)


def gathered(accelerator, loader, steps=None) -> list[int]:
    seen = []
    for step, batch in enumerate(loader, 1):
        seen += accelerator.gather_for_metrics(batch["i"]).tolist()
        names = accelerator.gather_for_metrics(list(batch["text"]))
        assert names == [f"row {i}" for i in seen[len(seen) - len(names) :]]
        if step == steps:
            break
    return seen


def epochs_of(kind: str, variant: str, dispatch: bool | None, workers: int) -> list[list[int]]:
    data = (
        stream(variant) if kind == "stream" else table().with_format(None if variant == "plain" else variant)
    )
    shuffle = {"shuffle": True} if kind == "shuffled" else {}
    accelerator, loader = prepared(data, dispatch, workers, **shuffle)
    return [gathered(accelerator, loader) for _ in range(2)]


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize(
    ("kind", "variant"), [("in order", "plain"), ("in order", "torch"), ("shuffled", "torch")]
)
def test_a_map_style_dataset_has_one_order(world, kind, variant, dispatch):
    (alone,) = world.run(epochs_of, kind, variant, dispatch, 0, size=1)
    for size, workers in ((2, 0), (3, 2)):
        for result in world.run(epochs_of, kind, variant, dispatch, workers, size=size, timeout_s=60):
            assert result == alone

    assert sorted(alone[0]) == list(range(LENGTH))
    assert (alone[0] == alone[1]) == (kind == "in order")


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_has_one_order_on_any_number_of_processes(world, variant, dispatch):
    (alone,) = world.run(epochs_of, "stream", variant, dispatch, 0, size=1)
    for result in world.run(epochs_of, "stream", variant, dispatch, 0, size=3, timeout_s=60):
        assert result == alone
    for result in world.run(epochs_of, "stream", variant, dispatch, 2, size=2, timeout_s=60):
        # It divides itself over the workers: the same samples, in an order of their number.
        assert [sorted(epoch) for epoch in result] == [sorted(epoch) for epoch in alone]


def stopped(variant: str, dispatch: bool | None, workers: int, folder: str) -> tuple[list, list]:
    accelerator, loader = prepared(stream(variant), dispatch, workers)
    epochs = [gathered(accelerator, loader) for _ in range(2)]
    loader.set_epoch(0)
    gathered(accelerator, loader)
    seen = gathered(accelerator, loader, 3)
    accelerator.save_state(folder)
    return epochs, seen


def resumed(variant: str, dispatch: bool | None, workers: int, folder: str) -> list[int]:
    accelerator, loader = prepared(stream(variant), dispatch, workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*: saved on . and loaded on . processes")
        accelerator.load_state(folder)
    return gathered(accelerator, loader)


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_continues_where_it_was(world, tmp_path, variant, workers, dispatch):
    folder = str(tmp_path / "state")
    epochs, seen = world.run(stopped, variant, dispatch, workers, folder, size=2, timeout_s=60)[0]
    assert seen == epochs[1][: len(seen)]

    for size, other in ((2, workers), (1, 2), (3, 0)):
        for rest in world.run(resumed, variant, dispatch, other, folder, size=size, timeout_s=60):
            assert seen + rest == epochs[1], (size, other)


def test_rows_that_were_handed_out_are_not_read_again():
    read = []

    def make():
        def note(row):
            read.append(row["i"])
            return row

        data = table().to_iterable_dataset(num_shards=4).map(note)
        return prepare_data_loader(DataLoader(data, BATCH_SIZE), num_processes=1, process_index=0)

    loader = make()
    for step, _ in enumerate(loader, 1):
        if step == 10:
            break
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    read.clear()

    assert [i for batch in again for i in batch["i"].tolist()] == read == list(range(30, LENGTH))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdata_continues_from_the_state_of_a_prepared_one():
    from torchdata.stateful_dataloader import StatefulDataLoader

    def state_of(variant):
        loader = prepare_data_loader(
            StatefulDataLoader(stream(variant), BATCH_SIZE), num_processes=1, process_index=0
        )
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        return loader.state_dict()

    plain = StatefulDataLoader(stream(), BATCH_SIZE)
    plain.load_state_dict(state_of("plain"))

    assert [i for batch in plain for i in batch["i"].tolist()] == list(range(4 * BATCH_SIZE, LENGTH))
    plain.load_state_dict(state_of("shuffled"))  # whose own state loses what is in the buffer
    with pytest.raises(AssertionError, match="State doesn't contain key"):
        iter(plain)


def split(kind: str, workers: int) -> tuple[str, list[int], int]:
    """Iterate this process's part; return the kind of loader, its rows twice, and the rows of a step."""
    process = current_process()
    data = table() if kind == "table" else stream("torch")
    if kind == "examples":
        data = table().to_iterable_dataset(num_shards=5)
    part = split_dataset_by_node(data, process.rank, process.world_size)
    loader = prepare_data_loader(DataLoader(part, BATCH_SIZE, num_workers=workers))
    rows = [[int(i) for batch in loader for i in batch["i"]] for _ in range(2)]
    assert sorted(rows[0]) == sorted(rows[1]) or kind != "table"
    return type(loader).__name__, rows[0], loader.total_batch_size


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["table", "shards", "examples"])
def test_a_part_for_each_process_passes_through(world, kind, workers):
    first, second = world.run(split, kind, workers, timeout_s=60)

    assert first[0] == second[0] == DataLoaderShard.__name__ != DataLoaderDispatcher.__name__
    assert sorted(first[1] + second[1]) == list(range(LENGTH))
    assert first[2] == second[2] == 2 * BATCH_SIZE


def refused(kind: str) -> str:
    rank = current_process().rank
    data = {
        "swapped": lambda: split_dataset_by_node(stream(), 1 - rank, 2),
        "of four": lambda: split_dataset_by_node(stream(), rank, 4),
        "swapped table": lambda: split_dataset_by_node(table(LENGTH + 1), 1 - rank, 2),
        "shuffled apart": lambda: table().shuffle(seed=rank),
        "split apart": lambda: table().train_test_split(test_size=6, seed=rank)["train"],
    }[kind]()
    with pytest.raises(ValueError, match=r"for process|different data") as error:
        prepare_data_loader(DataLoader(data, BATCH_SIZE))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("swapped", "its IterableDataset is for process 1 of 2, but this is process 0 of 2"),
        ("of four", "its IterableDataset is for process 0 of 4, but this is process 0 of 2"),
        ("swapped table", "lengths: 23 on process 0, 24 on process 1"),
        ("shuffled apart", "Pass a seed to whatever shuffles"),
        ("split apart", "lengths: 40 on process 0, 40 on process 1"),
    ],
)
def test_other_parts_are_rejected_on_every_process(world, kind, message):
    first, second = world.run(refused, kind, timeout_s=30)

    assert first == second
    assert message in first


def test_a_part_continues_on_as_many_processes_only():
    def make(rank, size):
        part = split_dataset_by_node(stream("torch"), rank, size)
        loader = DataLoader(part, BATCH_SIZE)
        return prepare_data_loader(loader, num_processes=size, process_index=rank)

    loader = make(0, 2)
    order = [i for batch in loader for i in batch["i"].tolist()]
    loader.set_epoch(0)
    for step, _ in enumerate(loader, 1):
        if step == 4:
            break
    state = loader.state_dict()
    again, other = make(0, 2), make(1, 2)
    again.load_state_dict(state)
    other.load_state_dict(state)  # that of process 0 tells how much each of them has read
    rest = [i for batch in other for i in batch["i"].tolist()]

    assert [i for batch in again for i in batch["i"].tolist()] == order[12:]
    assert sorted(order + [i for batch in make(1, 2) for i in batch["i"].tolist()]) == list(range(LENGTH))
    assert len(rest) == LENGTH - len(order) - 12
    with pytest.raises(ValueError, match="sharded over 2 processes"):
        make(0, 4).load_state_dict(state)


opened: list[str] = []


def rows_of_files(names):
    for name in names:
        opened.append(name)
        first = int(name.removeprefix("file "))
        yield from ({"i": 10 * first + row} for row in range(5 + first))


def files(count: int, seed: int | None = None) -> IterableDataset:
    names = [f"file {number}" for number in range(count)]
    data = IterableDataset.from_generator(rows_of_files, gen_kwargs={"names": names})
    return data if seed is None else data.shuffle(seed=seed, buffer_size=4)


def read_files(count: int, seeds: tuple, workers: int = 0, **kwargs) -> tuple[str, list[str], list]:
    """Return the kind of loader, which files this process opened, and its rows in two epochs."""
    rank = current_process().rank
    data = files(count, seeds[rank % len(seeds)])
    loader = prepare_data_loader(DataLoader(data, 2, num_workers=workers), **kwargs)
    opened.clear()
    rows = [[int(i) for batch in loader for i in batch["i"]] for _ in range(2)]
    return type(loader).__name__, sorted(set(opened)), rows


@pytest.mark.parametrize("kwargs", [{}, {"dispatch_batches": False}, {"split_batches": True}], ids=str)
@pytest.mark.parametrize("seed", [None, 3])
def test_each_process_opens_a_file_of_its_own(world, seed, kwargs):
    results = world.run(read_files, 2, (seed,), timeout_s=60, **kwargs)
    everything = sorted(row["i"] for row in files(2))

    assert [kind for kind, _, _ in results] == ["DataLoaderShard"] * 2
    if seed is None:  # in each epoch the files of a shuffled stream are dealt out again
        assert [names for _, names, _ in results] == [["file 0"], ["file 1"]]
    for epoch in range(2):
        assert sorted(i for _, _, rows in results for i in rows[epoch]) == everything


@pytest.mark.parametrize("dispatch", [None, False])
def test_the_files_of_a_process_may_be_requested_without_a_process_group(dispatch):
    shares = []
    for rank in range(2):
        loader = prepare_data_loader(
            DataLoader(files(2), 2), num_processes=2, process_index=rank, dispatch_batches=dispatch
        )
        opened.clear()
        shares.append([int(i) for batch in loader for i in batch["i"]])
        assert set(opened) == {f"file {rank}"}

    assert shares == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14, 15]]


def test_a_file_for_each_process_goes_through_workers(world):
    results = world.run(read_files, 2, (None,), 1, timeout_s=60)

    assert sorted(i for _, _, rows in results for i in rows[0]) == sorted(row["i"] for row in files(2))


@pytest.mark.parametrize(
    ("count", "seeds", "kwargs"),
    [(2, (1, 2), {}), (4, (None,), {}), (2, (None,), {"dispatch_batches": True})],
)
def test_other_streams_are_dispatched_unsplit(world, count, seeds, kwargs):
    """Among them one that is shuffled without a seed, which has another order of files on each process."""
    first, second = world.run(read_files, count, seeds, timeout_s=60, **kwargs)

    assert first[0] == second[0] == "DataLoaderDispatcher"
    assert (len(first[1]), second[1]) == (count, [])


def goes_on() -> tuple[list[int], list[int], tuple[int, int]]:
    def make():
        return prepare_data_loader(DataLoader(files(2, 3), 2))

    loader = make()
    rows = [i for batch in loader for i in batch["i"].tolist()]
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    return rows, [i for batch in again for i in batch["i"].tolist()], state["part"]


def test_a_file_for_each_process_continues_where_it_was(world):
    for rank, (rows, rest, part) in enumerate(world.run(goes_on, timeout_s=60)):
        assert rest == rows[2:]
        assert tuple(part) == (rank, 2)


def evaluates(count: int, dispatch: bool | None, epochs: int = 2) -> tuple[list[str], list[list[int]]]:
    """Gather the rows of files in each step; return warnings, errors and the rows."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    names = [f"file {4 * (number % count)}" for number in range(2)]  # of 5 and 9 rows, or of 5 and 5
    data = IterableDataset.from_generator(rows_of_files, gen_kwargs={"names": names})
    loader = accelerator.prepare(DataLoader(data, 2))
    texts: list[str] = []
    rows: list[list[int]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            rows.append([])
            try:
                for batch in loader:
                    rows[-1] += accelerator.gather_for_metrics(batch["i"]).tolist()
            except RuntimeError as raised:
                texts.append(str(raised))
    return [*(str(warning.message) for warning in caught), *texts], rows


def test_files_that_differ_in_size_raise_in_the_step_that_another_process_does_not_make(world):
    (first, _), (second, _) = world.run(evaluates, 2, None, timeout_s=60)

    assert first == []
    told, again, *raised = second
    assert told == again
    assert told.startswith("Process 0 has only 3 batches of this loader, and process 1 is in step 4, as")
    assert len(raised) == 2
    for text in raised:
        assert "process 0 has only 3 batches of the DataLoaderShard over IterableDataset" in text
        assert "pass dispatch_batches=True" in text


@pytest.mark.parametrize(("count", "dispatch"), [(1, None), (2, True)])
def test_files_of_one_size_and_those_that_are_handed_out_count_once(world, count, dispatch):
    everything = sorted([*range(5), *(range(5) if count == 1 else range(40, 49))])
    for texts, rows in world.run(evaluates, count, dispatch, timeout_s=60):
        assert texts == []
        assert [sorted(epoch) for epoch in rows] == [everything] * 2
