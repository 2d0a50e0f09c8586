from collections import Counter, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from accel_data.dispatch.channel import NO_BATCH, Message, Receiver, Sender, get_dispatch_group
from accel_data.order.layout import StepRows
from accel_state.process.state import current_process

Pair = namedtuple("Pair", "left right")


@dataclass
class Example:
    ids: torch.Tensor
    text: str


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
]


def every_kind(rank):
    """A batch with everything that may be in one, different for each process."""
    return {
        "dtypes": [(torch.arange(6 + rank) % 2).to(dtype) for dtype in DTYPES],
        "scalar": torch.tensor(rank),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T + rank,
        "sparse": torch.eye(2).to_sparse(),
        "strings": ["a", f"rank {rank}", None],
        "pair": Pair(torch.ones(1) * rank, rank),
        "example": Example(torch.full((2,), rank), "text"),
        "mapping": UserDict(x=torch.tensor([1.5])),
        3: (),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, (dict, UserDict)):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Example):
        return same(one.ids, other.ids) and one.text == other.text
    return type(one) is type(other) and one == other


def converse(steps, data_ranks=None):
    """Send some steps from process 0; return what this process has received, and the bytes of structure."""
    process = current_process()
    data_ranks = data_ranks or range(process.world_size)
    if not process.is_main:
        receiver = Receiver(get_dispatch_group(), data_ranks)
        receiver.begin()
        received = []
        while (message := receiver.receive()) is not None:
            received.append(message)
            if message.last:
                break
        return received, None
    sender = Sender(get_dispatch_group(), data_ranks)
    sender.begin()
    structures = []
    for parts, step_rows, last in steps:
        packets = sender.pack(parts)
        structures.append({part: packet and len(packet.structure) for part, packet in packets.items()})
        sender.send(packets, step_rows, last)
    if not last:
        sender.stop()
    sender.close()
    return [], structures


def every_kind_arrives():
    rank = current_process().rank
    received, _ = converse([([every_kind(part) for part in range(3)], StepRows((2, 1, 0), (2, 2, 2)), True)])
    if rank:
        (message,) = received
        assert message.step_rows == StepRows((2, 1, 0), (2, 2, 2))
        assert message.last is True
        assert same(message.batch, every_kind(rank))
        assert type(message.batch["pair"]) is Pair
        message.batch["dtypes"][0].logical_not_()  # it owns its memory


def test_every_kind_of_batch_arrives(world):
    world.run(every_kind_arrives, size=3)


def grows_and_shrinks():
    sizes = [1, 5000, 3, 20000, 1]
    steps = [([torch.arange(size), torch.arange(size) + 1], None, False) for size in sizes]
    received, _ = converse(steps)

    return [(len(message.batch), message.step_rows, message.last) for message in received]


def test_batches_of_any_size_arrive(world):
    nothing, received = world.run(grows_and_shrinks, size=2)

    assert nothing == []
    assert received == [(size, None, False) for size in (1, 5000, 3, 20000, 1)]


def sends_structures():
    batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}, {"x": torch.ones(3)}, {"x": torch.zeros(3)}]
    received, structures = converse([([batch, batch], None, False) for batch in batches])

    return structures or [message.batch["x"].tolist() for message in received]


def test_the_structure_is_sent_when_it_changes(world):
    structures, received = world.run(sends_structures, size=2)

    assert received == [[1.0] * 2, [0.0] * 2, [1.0] * 3, [0.0] * 3]
    assert {*map(tuple, structures)} == {(1,)}  # nothing is made for process 0 itself
    assert [bool(sizes[1]) for sizes in structures] == [True, False, True, False]


def counts_bytes():
    """Return the bytes of the messages to each other process."""
    sent = Counter()

    def count_sends(content, rank, **kwargs):
        sent[rank] += content.nbytes
        return isend(content, rank, **kwargs)

    isend, dist.isend = dist.isend, count_sends
    try:
        converse([([torch.ones(size, dtype=torch.uint8) for size in (3000, 500, 1500)], None, True)])
    finally:
        dist.isend = isend
    return sent


def test_each_process_is_sent_its_own_part_alone(world):
    sent, *_ = world.run(counts_bytes, size=3)
    headers = {1: sent[1] - 500, 2: sent[2] - 1500}

    assert all(0 < size < 500 for size in headers.values())


def small_tensors_are_free():
    received, _ = converse([([(torch.ones(1), torch.ones(10**6))] * 2, None, True)])
    return [message.batch[0].untyped_storage().nbytes() for message in received]


def test_a_small_tensor_does_not_keep_the_buffer(world):
    assert world.run(small_tensors_are_free, size=2)[1] == [4]


def shares_parts():
    parts = [torch.tensor([0]), torch.tensor([1])]
    received, _ = converse([(parts, StepRows((1, 0), (1, 1)), True)], data_ranks=[0, 0, 1, 1])
    return [Message(message.batch.tolist(), *message[1:]) for message in received]


def test_several_processes_may_get_the_same_part(world):
    results = world.run(shares_parts, size=4)

    step_rows = StepRows((1, 0), (1, 1))
    assert results == [[], [([0], step_rows, True)], [([1], step_rows, True)], [([1], step_rows, True)]]


def some_have_none():
    received, _ = converse([([torch.ones(1), NO_BATCH], None, True)])
    return len(received)


def test_a_process_without_a_batch_stops(world):
    assert world.run(some_have_none, size=2) == [0, 0]


def fails():
    if current_process().is_main:
        sender = Sender(get_dispatch_group(), range(2))
        sender.begin()
        sender.fail(ValueError("bad sample " + "x" * 5000))
        sender.close()
    else:
        receiver = Receiver(get_dispatch_group(), range(2))
        receiver.begin()
        with pytest.raises(
            RuntimeError, match=r"Process 0, which reads .* failed: ValueError: bad sample xxx"
        ):
            receiver.receive()


def test_a_failure_reaches_the_others(world):
    world.run(fails, size=2)


def fails_between():
    data_ranks = range(3)
    if not current_process().is_main:
        receiver, received = Receiver(get_dispatch_group(), data_ranks), []
        receiver.begin()
        received.append(receiver.receive().batch)
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            receiver.receive()
        receiver.begin()
        received.append(receiver.receive().batch)
        return received
    sender = Sender(get_dispatch_group(), data_ranks)
    sender.begin()
    sender.send(sender.pack(["a"] * 3), None, False)
    with pytest.raises(TypeError, match="cannot be pickled") as caught:
        sender.pack(["b", "b", lambda: 0])  # the second is ready to be sent by then
    sender.fail(caught.value)
    sender.begin()
    sender.send(sender.pack(["b"] * 3), None, True)
    sender.close()
    return []


def test_a_structure_that_was_not_sent_is_sent_later(world):
    assert world.run(fails_between, size=3) == [[], ["a", "b"], ["a", "b"]]
