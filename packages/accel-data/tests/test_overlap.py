"""What dispatched loaders do while batches are used, when loops are left, and when something fails."""

import gc
import threading
import time
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import prepare_data_loader, sample_rng, skip_first_batches
from accel_state.process.state import current_process

pytestmark = pytest.mark.usefixtures("fresh_state")


def dispatched(loader, **kwargs):
    return prepare_data_loader(loader, dispatch_batches=True, **kwargs)


class CountingIterator(Dataset):
    """Numbers; counts how many have been read in this process."""

    def __init__(self, length=24, act=lambda index: None):
        self.length = length
        self.act = act
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.act(index)
        self.reads += 1
        return index


class CountedStream(IterableDataset):
    def __init__(self, length=24):
        self.length = length
        self.reads = 0

    def __iter__(self):
        for index in range(self.length):
            self.reads += 1
            yield index


def reaches(data, reads):
    until = time.monotonic() + 10
    while data.reads < reads and time.monotonic() < until:
        time.sleep(0.001)
    return data.reads >= reads


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-data")]


def reads_while_used(stream):
    data = CountedStream() if stream else CountingIterator()
    step = 2 * current_process().world_size
    further = step if stream else 0  # to see which step is the last one
    for number, _ in enumerate(dispatched(DataLoader(data, 2)), 1):
        if current_process().is_main:
            assert reaches(data, min((number + 1) * step + further, 24))
            time.sleep(0.005)
            assert data.reads <= (number + 1) * step + further
    assert data.reads == (24 if current_process().is_main else 0)
    assert threads() == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_batch_is_read_while_one_is_used(world, stream):
    world.run(reads_while_used, stream, size=2)


def sends_while_used():
    batches = iter(dispatched(DataLoader(range(36), 2)))
    seen = [next(batches).tolist()]
    if current_process().is_main:
        dist.barrier()  # the others come here with their next batch in hand
        seen.append(next(batches).tolist())
    else:
        seen.append(next(batches).tolist())
        dist.barrier()
    return seen


def test_the_next_batch_arrives_while_process_0_uses_its_own(world):
    results = world.run(sends_while_used, size=3)

    assert results == [[[2 * rank, 2 * rank + 1], [2 * rank + 6, 2 * rank + 7]] for rank in range(3)]


def beside_collectives():
    total, rank = 0, current_process().rank
    for batch in dispatched(DataLoader(range(600), 2)):
        summed = batch.clone()
        dist.all_reduce(summed)
        gathered = [torch.empty_like(batch) for _ in range(3)]
        dist.all_gather(gathered, batch)
        assert torch.equal(summed, sum(gathered))
        assert torch.equal(gathered[rank], batch)
        total += summed.sum().item()
    return total


def test_the_users_collectives_do_not_mix_with_it(world):
    assert world.run(beside_collectives, size=3) == [sum(range(600))] * 3


def beside_messages():
    """Send messages of the user's own, with the tags that loaders use."""
    rank = current_process().rank
    for number, batch in enumerate(dispatched(DataLoader(range(60), 2))):
        note = torch.tensor([number * 10 + rank])
        for tag in range(3):
            if rank == 0:
                dist.send(note, 1, tag=tag)
            else:
                dist.recv(note, 0, tag=tag)
        assert note.item() == number * 10
        assert batch.tolist() == [4 * number + 2 * rank, 4 * number + 2 * rank + 1]


def test_the_users_messages_do_not_mix_with_it(world):
    world.run(beside_messages, size=2)


def dropped_early():
    """Drop a loader while its next batch is requested and not yet sent."""
    batches = iter(dispatched(DataLoader(CountingIterator(act=draw), 2)))
    next(batches)
    if not current_process().is_main:
        del batches
        gc.collect()
    dist.barrier()
    batches = None
    dist.barrier()
    return [batch.tolist() for batch in dispatched(DataLoader(range(8), 2))]


def test_a_loader_that_is_dropped_early_leaves_the_others_working(world):
    assert world.run(dropped_early, size=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def nested():
    inner = dispatched(DataLoader(range(100, 112), 2))
    outer = dispatched(DataLoader(range(12), 2))
    return [
        (first.tolist(), [second.tolist() for second in islice(inner, 1 + number)])
        for number, first in enumerate(outer)
    ]


def test_loaders_may_be_nested(world):
    first, second = world.run(nested, size=2)

    assert [outer for outer, _ in first] == [[0, 1], [4, 5], [8, 9]]
    assert [outer for outer, _ in second] == [[2, 3], [6, 7], [10, 11]]
    assert [inner for _, inner in second][1] == [[102, 103], [106, 107]]


def two_at_once():
    loader = dispatched(DataLoader(range(24), 2))
    first, second = iter(loader), iter(loader)
    seen = [next(first).tolist(), next(second).tolist()]
    with pytest.raises(RuntimeError, match=r"Another iteration over this loader began .* Prepare a second"):
        next(first)
    seen.append(next(second).tolist())
    second.close()
    dist.barrier()
    assert threads() == []
    return seen


def test_a_second_iteration_over_one_loader_ends_the_first(world):
    results = world.run(two_at_once, size=2)

    assert results == [[[0, 1], [0, 1], [4, 5]], [[2, 3], [2, 3], [6, 7]]]


def widths(samples):
    return {"x": torch.tensor([[sample] * (1 + max(samples) // 3) for sample in samples])}


def left_early(kind, workers):
    """Leave loops at all places, over loaders that live on and ones that do not."""
    make = {
        "map": lambda: DataLoader(range(24), 2, collate_fn=widths, num_workers=workers),
        "shuffled": lambda: DataLoader(range(24), 2, True, collate_fn=widths, num_workers=workers),
        "stream": lambda: DataLoader(CountedStream(), 2, collate_fn=widths, num_workers=workers),
    }[kind]
    whole = [batch["x"][:, 0].tolist() for batch in dispatched(make(), data_seed=1)]
    kept = dispatched(make(), data_seed=1)
    for stop in range(1, len(whole) + 1) if not workers else (1, 3):
        for loader in (kept, dispatched(make(), data_seed=1)):
            loader.set_epoch(0)
            seen = [batch["x"][:, 0].tolist() for batch in islice(loader, stop)]
            assert seen == whole[:stop]
            assert threads() == []
            rest = dispatched(make(), data_seed=1)
            state = loader.state_dict()
            if stop < len(whole):
                assert state["consumed"] == 2 * current_process().world_size * stop
                rest.load_state_dict(state)
                seen += [batch["x"][:, 0].tolist() for batch in rest]
                assert seen == whole
            skipped = skip_first_batches(loader, 1)
            skipped.set_epoch(0)
            assert next(iter(skipped))["x"][:, 0].tolist() == whole[1]


@pytest.mark.parametrize("kind", ["map", "shuffled", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_may_be_left_anywhere(world, kind, workers):
    world.run(left_early, kind, workers, size=2)


def fails_in_the_loop(who):
    rank, caught = current_process().rank, None
    loader = dispatched(DataLoader(range(24), 2))
    try:
        for number, _ in enumerate(loader):
            if number == 1 and rank in who:
                raise ArithmeticError(rank)
    except (ArithmeticError, RuntimeError) as error:
        caught = error  # its traceback keeps the loop's frame, and with it the generator
    text = f"{type(caught).__name__}: {caught}"
    kept = [batch.tolist() for batch in loader] if len(who) > 1 else None
    del caught
    return text, kept


def test_an_error_in_the_loop_of_all(world):
    first, second = world.run(fails_in_the_loop, [0, 1], size=2)

    assert first[0] == "ArithmeticError: 0"
    assert second[0] == "ArithmeticError: 1"
    assert first[1][0] == [0, 1]
    assert second[1][-1] == [22, 23]


def test_process_0_leaving_the_loop_alone_reaches_the_others(world):
    results = world.run(leaves_alone, size=3)

    assert results[0] == 1
    assert "has left the loop over this loader" in results[1]
    assert results[1] == results[2]


def leaves_alone():
    loader = dispatched(DataLoader(range(24), 2))
    if current_process().is_main:
        return len(list(islice(loader, 1)))
    with pytest.raises(RuntimeError, match="must leave a loop at the same batch") as caught:
        list(loader)
    return str(caught.value)


def process_is_gone(gone):
    loader = dispatched(DataLoader(range(600), 2))
    batches = iter(loader)
    next(batches)
    if current_process().rank == gone:
        time.sleep(0.1)  # what it reads ahead has been sent
        dist.destroy_process_group()  # what the end of a process does to its connections
        return None
    with pytest.raises(RuntimeError, match=r"rocess.* has exited; no more batches") as caught:
        list(batches)
    return str(caught.value)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_is_gone_is_noticed(world, gone):
    world.run(process_is_gone, gone, size=2)


def augmented(draw):
    torch.manual_seed(7)
    data = CountingIterator(12, act=draw)
    drawn = []
    loader = dispatched(DataLoader(data, 2))
    for number, _ in enumerate(loader, 1):
        if current_process().is_main:
            time.sleep(0.005)
            assert data.reads == 2 * current_process().world_size * number  # each in its turn
        drawn.append(torch.rand(1).item())
    return drawn


def draw(index):
    torch.rand(1)


def draw_apart(index):
    with sample_rng(index):
        torch.rand(1)


def test_reading_that_draws_stays_in_turn(world):
    one, _ = world.run(draws_plainly, size=2)
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()  # the seed of the workers
    expected = []
    for _ in range(3):
        torch.rand(4)
        expected.append(torch.rand(1).item())

    assert one == expected


def draws_plainly():
    return augmented(draw)


def draws_apart():
    return augmented(draw_apart)


def test_reading_with_generators_apart_stays_in_turn(world):
    one, other = world.run(draws_apart, size=2)

    assert one == other


SCRIPT = """
import sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from accel_data import prepare_data_loader

dist.init_process_group("gloo")
for number, batch in enumerate(prepare_data_loader(DataLoader(range(600), 2), dispatch_batches=True)):
    if number == 3 and sys.argv[1] == "leave":
        break
    if number == 3 and sys.argv[1] == "fail" and dist.get_rank() == 0:
        raise ArithmeticError("a bad step")
sys.stdout.write(f"left {number}\\n")  # in one piece, as two processes write
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["leave", "fail"])
def test_a_script_ends_in_the_middle_of_a_loop(launched, way):
    run = launched(SCRIPT, way, launcher="torchrun")

    if way == "leave":
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("left 3") == 2
    else:
        assert run.returncode != 0
        assert "ArithmeticError: a bad step" in run.stderr
