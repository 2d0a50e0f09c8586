import io
import itertools
import random
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import prepare_data_loader, sample_generator, sample_rng, sample_seed, skip_first_batches
from accel_state.gradient import GradientState
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


class Augmented:
    """Each sample is (its index, its seed)."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, sample_seed(index)])


class AugmentedStream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for index in range(self.length):
            yield torch.tensor([index, sample_seed(index)])


class EagerStream(AugmentedStream):
    """Asks for all seeds before the first sample is read."""

    def __iter__(self):
        return iter([torch.tensor([index, sample_seed(index)]) for index in range(self.length)])


def prepare(loader, processes=1, rank=0, **kwargs):
    options = {"data_seed": 3, "dispatch_batches": False, **kwargs}
    return prepare_data_loader(loader, num_processes=processes, process_index=rank, **options)


def read(loaders, steps=None):
    """Read an epoch, or some steps of it; return the seed of each index, and check that it has only one."""
    seeds = {}
    for loader in loaders:
        for step, batch in enumerate(loader, 1):
            for index, seed in batch.tolist():
                assert seeds.setdefault(index, seed) == seed  # padding is augmented in the same way
            if step == steps:
                break
    return seeds


KINDS = {
    "sequential": lambda n, **kw: DataLoader(Augmented(n), **kw),
    "shuffle": lambda n, **kw: DataLoader(Augmented(n), shuffle=True, **kw),
    "generator": lambda n, **kw: DataLoader(
        Augmented(n), shuffle=True, generator=torch.Generator().manual_seed(2), **kw
    ),
    "stream": lambda n, **kw: DataLoader(AugmentedStream(n), **kw),
    "eager stream": lambda n, **kw: DataLoader(EagerStream(n), **kw),
}


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(sorted(KINDS)),
    st.booleans(),
    st.booleans(),
)
def test_seeds_do_not_depend_on_the_number_of_processes(length, batch_size, processes, kind, split, even):
    batch_size *= processes if split else 1
    alone = [prepare(KINDS[kind](length, batch_size=1))]
    is_distributed = [
        prepare(
            KINDS[kind](length, batch_size=batch_size),
            processes,
            rank,
            split_batches=split,
            even_batches=even,
        )
        for rank in range(processes)
    ]
    epochs = [read(alone) for _ in range(2)]

    assert [read(is_distributed) for _ in range(2)] == epochs
    assert len({seed for epoch in epochs for seed in epoch.values()}) == 2 * length  # all differ
    assert all(0 <= seed < 2**63 for epoch in epochs for seed in epoch.values())


@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from(sorted(KINDS)),
)
def test_seeds_are_the_same_after_a_resume(length, batch_size, processes, stop, kind):
    uninterrupted = [prepare(KINDS[kind](length, batch_size=batch_size))]
    epochs = [read(uninterrupted) for _ in range(3)]
    first = prepare(KINDS[kind](length, batch_size=batch_size))
    seen = [read([first]), read([first], stop) if stop else {}]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    again = [
        prepare(KINDS[kind](length, batch_size=batch_size), processes, rank, data_seed=99)
        for rank in range(processes)
    ]
    for loader in again:
        loader.load_state_dict(state)
    rest = read(again)

    assert seen[0] == epochs[0]
    following = again[0].state_dict()["epoch"] - 1  # that of the rest
    assert rest.items() <= epochs[following].items()
    assert {**(seen[1] if following == 1 else {}), **rest} == epochs[following]


class SetUp:
    """What the user's worker_init_fn sets up in a worker."""

    worker = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert sample_seed(index)
        return self.worker


def set_up(worker_id):
    SetUp.worker = worker_id


def test_the_users_worker_init_fn_is_called():
    loader = prepare(DataLoader(SetUp(), num_workers=2, worker_init_fn=set_up))

    assert torch.cat(list(loader)).tolist() == [0, 1, 0, 1]
    assert loader.worker_init_fn is set_up
    assert SetUp.worker is None


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "stream", "eager stream"])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_seeds_do_not_depend_on_workers(kind, dispatch, persistent):
    without, workers = (
        [prepare(KINDS[kind](13, batch_size=2, **settings), dispatch_batches=dispatch)]
        for settings in (
            {},
            {"num_workers": 2, "persistent_workers": persistent},
        )
    )
    for _ in range(3):
        assert read(workers) == read(without)


class Draws:
    """Each sample has the worker's seed, and a number of each global generator."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        worker = get_worker_info()
        seeds = worker.seed if worker else 0, torch.initial_seed()
        return [index, *seeds, torch.rand(()).item(), random.random(), numpy.random.rand()]


def drawn(sampling, data_ranks):
    torch.manual_seed(5)
    rank = current_process().rank
    options = {"data_ranks": data_ranks} if data_ranks else {"num_processes": 2, "process_index": rank}
    settings = {"num_workers": 2, "collate_fn": tuple, **sampling}
    loader = prepare_data_loader(DataLoader(Draws(), 2, **settings), **options)
    seen = [row for batch in loader for row in batch]
    return seen, torch.rand(()).item()


@pytest.mark.parametrize("sampling", [{}, {"shuffle": True}, {"persistent_workers": True}])
@pytest.mark.parametrize("data_ranks", [None, [0, 0]])
def test_workers_of_each_process_draw_other_numbers(world, sampling, data_ranks):
    (first, after), (second, other_after) = world.run(drawn, sampling, data_ranks, size=2)

    assert after == other_after  # the main process draws as it did
    if data_ranks:  # both work on the same batches
        assert first == second
        return
    assert len(first) == len(second) == 4
    for one, other in itertools.product(first, second):
        assert not set(one) & set(other)
    assert world.run(drawn, sampling, data_ranks, size=2)[1][0] == second


class ShuffledByWorkers(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(8).tolist())


def read_shuffled_by_workers():
    torch.manual_seed(5)
    loader = prepare_data_loader(DataLoader(ShuffledByWorkers(), 2, num_workers=1), dispatch_batches=False)
    return [sample for batch in loader for sample in batch.tolist()]


def test_a_stream_that_workers_shuffle_has_one_order_on_all_processes(world):
    first, second = world.run(read_shuffled_by_workers, size=2)
    assert sorted(first + second) == list(range(8))


def test_workers_that_live_on_forget_an_epoch_that_was_left():
    loader, other = (
        prepare(KINDS["shuffle"](40, batch_size=2, num_workers=workers, persistent_workers=workers > 0))
        for workers in (2, 0)
    )
    read([loader], 1), read([other], 1)

    assert read([loader]) == read([other])
    skipped = skip_first_batches(loader, 3)
    assert read([skipped]) == read([skip_first_batches(other, 3)])


def test_spawned_workers_have_the_seeds():
    spawn = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    # A spawned worker cannot import this file, so that the dataset is a range and collating reads the seed.
    alone, spawned = (
        prepare(DataLoader(range(5), shuffle=True, batch_size=None, collate_fn=sample_seed, **settings))
        for settings in ({}, spawn)
    )
    for _ in range(2):
        seeds = list(alone)
        assert list(spawned) == seeds
        assert len(set(seeds)) == 5


def test_iterations_side_by_side_have_epochs_of_their_own():
    for workers in (0, 1):
        loader = prepare(KINDS["sequential"](6, num_workers=workers))
        pairs = [torch.cat(pair) for pair in zip(loader, loader, strict=True)]
        alone = prepare(KINDS["sequential"](6))

        assert [dict(side.tolist()) for side in torch.stack(pairs, dim=1)] == [read([alone]), read([alone])]


def test_two_loaders_that_take_turns_do_not_mix():
    def make():
        return prepare(KINDS["sequential"](6)), prepare(KINDS["stream"](6), data_seed=4)

    first, second = (torch.stack(side) for side in zip(*zip(*make(), strict=True), strict=True))
    alone = [torch.stack(list(loader)) for loader in make()]

    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])
    assert not torch.equal(first, second)


def test_a_loader_inside_of_a_dataset_does_not_mix_either():
    class Nested(Augmented):
        def __getitem__(self, index):
            before = sample_seed(index)
            inner = read([prepare(KINDS["sequential"](3), data_seed=8)])
            return torch.tensor([index, before, sample_seed(index), inner[0]])

    outer = torch.cat(list(prepare(DataLoader(Nested(4)))))

    assert torch.equal(outer[:, 1], outer[:, 2])
    assert outer[:, 3].unique().tolist() == [read([prepare(KINDS["sequential"](3), data_seed=8)])[0]]


def test_loaders_and_seeds_of_the_run_differ():
    def seeds(seed):
        torch.manual_seed(seed)
        state = GradientState.new()
        loaders = [
            prepare(KINDS[kind](5), data_seed=None, gradient_state=state)
            for kind in ("sequential", "shuffle", "stream", "sequential")
        ]
        return [read([loader]) for loader in loaders]

    one, again, other = seeds(1), seeds(1), seeds(2)

    assert one == again
    assert len({epoch[0] for epoch in one + other}) == 8


class Noisy(Augmented):
    def __getitem__(self, index):
        own = torch.rand(2, generator=sample_generator(index)).tolist()
        with sample_rng(index):
            shared = [torch.rand(1).item(), random.random(), numpy.random.rand()]
        return torch.tensor([index, *own, *shared])


def test_what_is_drawn_depends_on_the_seed_alone():
    def rows(**kwargs):
        drawn = torch.cat(list(prepare(DataLoader(Noisy(4), **kwargs))))
        return drawn[drawn[:, 0].argsort()]

    torch.manual_seed(5)
    expected = rows()
    following = torch.rand(1)
    torch.rand(100), random.random(), numpy.random.rand()

    assert torch.equal(rows(shuffle=True), expected)
    assert torch.equal(rows(num_workers=2), expected)
    assert len(expected[:, 1:].unique()) == 4 * 4  # torch's two begin with the same numbers
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # what any loader draws for its workers
    assert torch.equal(torch.rand(1), following)  # the global generators continue as if nothing was drawn


class Seeds:
    """A dataset that does not know who reads it."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return sample_seed(index)


def test_no_seed_without_a_prepared_loader():
    data = Seeds()
    loader = prepare(DataLoader(data))
    with pytest.raises(
        RuntimeError, match=r"no seed for sample 2: .*prepare_data_loader or Accel.*\.prepare"
    ):
        data[2]
    for _ in loader:
        with pytest.raises(RuntimeError, match="no prepared loader is fetching"):
            data[0]  # in the loop nothing is fetched
        with pytest.raises(RuntimeError, match="no prepared loader is fetching"):
            next(iter(DataLoader(data)))
        break
    with pytest.raises(RuntimeError, match="no prepared loader is fetching"):
        data[0]


def test_workers_of_a_plain_loader_have_no_seed():
    class Asks(Seeds):
        def __getitem__(self, index):
            return [seed_or_error(index)]

    for loader in (prepare(DataLoader(Asks(), num_workers=1)), DataLoader(Asks(), num_workers=1)):
        texts = [str(batch) for batch in loader]
        assert len(texts) == 3
        assert all(("no prepared loader" in text) == (type(loader) is DataLoader) for text in texts)


def test_no_seed_after_a_failure():
    class Failing(Seeds):
        def __getitem__(self, index):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(prepare(DataLoader(Failing())))
    with pytest.raises(RuntimeError, match="no prepared loader is fetching"):
        sample_seed(0)


def test_another_thread_has_no_seed():
    class Threaded(Seeds):
        def __getitem__(self, index):
            errors = []
            thread = threading.Thread(target=lambda: errors.append(seed_or_error(index)))
            thread.start()
            thread.join()
            return errors[0]

    ((error,),) = [list(batch) for batch in prepare(DataLoader(Threaded(), sampler=[1]))]
    assert "no prepared loader is fetching samples in this thread" in error


def seed_or_error(index):
    try:
        return sample_seed(index)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("index", ["a key", 1.5, None, (1, 2)])
def test_an_index_that_is_no_integer_is_rejected(index):
    class Keys(Seeds):
        def __getitem__(self, _):
            return sample_seed(index)

    with pytest.raises(
        TypeError, match=r"takes an integer, but got .*Pass one that distinguishes the sample"
    ) as error:
        list(prepare(DataLoader(Keys())))
    assert repr(index) in str(error.value)


def test_integers_of_any_kind_are_taken():
    class Kinds(Seeds):
        def __getitem__(self, _):
            return [sample_seed(kind(1)) for kind in (int, numpy.int32, torch.tensor)]

    (seeds, *_) = list(prepare(DataLoader(Kinds(), collate_fn=lambda samples: samples[0])))
    assert len(set(seeds)) == 1


def read_in_world(kind, dispatch):
    torch.manual_seed(current_process().rank if current_process().world_size > 1 else 0)
    loader = prepare_data_loader(KINDS[kind](11, batch_size=2), dispatch_batches=dispatch)
    return [read([loader]) for _ in range(2)], loader.state_dict()["sample_seed"]


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "stream"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_processes_that_are_seeded_differently_augment_equally(world, kind, dispatch):
    ((expected, seed),) = world.run(read_in_world, kind, dispatch, size=1)
    results = world.run(read_in_world, kind, dispatch, size=2)

    for epoch in range(2):
        assert {**results[0][0][epoch], **results[1][0][epoch]} == expected[epoch]
    assert [own for _, own in results] == [seed, seed]


def test_a_profile_has_the_region_of_each_batch() -> None:
    loader = prepare_data_loader(DataLoader(range(6), 2))

    with torch.autograd.profiler.profile() as profiled:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]

    regions = [event for event in profiled.function_events if "DataLoader" in event.name]
    assert len(regions) == 4  # the last one finds the end
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
