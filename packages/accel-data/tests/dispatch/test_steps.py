import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.dispatch.channel import ABSENT
from accel_data.dispatch.steps import Read, Rounds
from accel_data.order.layout import StepRows
from accel_ops.trees.tensors import slice_tensors


def rounds(reads, *args):
    return list(Rounds(*args).of(iter(reads)))


def lists(parts):
    return [None if part is ABSENT else part.tolist() for part in parts]


def real_rows(found):
    """Return the rows that are no padding, in rank order."""
    real = found.fill.real if found.fill else [None] * len(found.parts)
    return [
        row
        for part, count in zip(found.parts, real, strict=True)
        if part is not ABSENT
        for row in part.tolist()[:count]
    ]


def test_batches_are_dealt_out_in_turn():
    reads = [Read(torch.tensor([2 * i, 2 * i + 1]), None) for i in range(4)]

    first, second = rounds(reads, 2, 2, True, False, None)
    assert lists(first.parts) == [[0, 1], [2, 3]]
    assert lists(second.parts) == [[4, 5], [6, 7]]
    assert first.fill is second.fill is None


def test_a_missing_batch_is_the_first_one_again():
    reads = [
        Read(torch.tensor([0, 1]), None),
        Read(torch.tensor([2, 3]), None),
        Read(torch.tensor([4, 0]), StepRows((1,), (2,))),
    ]

    last = rounds(reads, 2, 2, True, False, None)[-1]
    assert lists(last.parts) == [[4, 0], [0, 1]]
    assert last.fill == ((1, 0), (2, 2))
    assert lists(rounds(reads, 2, 2, False, False, None)[-1].parts) == [[4, 0], None]
    assert len(rounds(reads, 2, 2, True, True, None)) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_whole_batches_of_any_size_stay_as_they_are(sizes, processes, even):
    batches = torch.arange(sum(sizes)).split(sizes)
    found = rounds([Read(batch, None) for batch in batches], processes, None, even, False, None)

    assert [row for part in found for row in real_rows(part)] == list(range(sum(sizes)))
    parts = [batch for part in found for batch in part.parts if batch is not ABSENT]
    assert all(part is batch for part, batch in zip(parts, batches, strict=False))
    # What is left are whole batches from the start, on the processes that would have none.
    missing = -len(batches) % processes if even else 0
    padding = parts[len(batches) :]
    start = batches[: min(processes, len(batches))]
    assert all(part is start[index % len(start)] for index, part in enumerate(padding))
    assert len(padding) == missing
    assert not even or all(len(part.parts) == processes and ABSENT not in part.parts for part in found)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_whole_batches_are_split(sizes, processes, even):
    data = iter(range(100))
    reads = [Read(torch.tensor([next(data) for _ in range(size)]), None) for size in sizes]
    found = rounds(reads, processes, None, even, False, slice_tensors)

    assert len(found) == len(sizes)
    assert [row for part in found for row in real_rows(part)] == list(range(sum(sizes)))
    for part in found:
        rows = {len(batch) for batch in part.parts if batch is not ABSENT}
        assert not even or (len(rows) == 1 and ABSENT not in part.parts)


def test_a_slicing_function_gets_process_and_number():
    calls = []

    def slice_fn(batch, rows, process_index, num_processes):
        calls.append((rows, process_index, num_processes))
        return batch[rows]

    rounds([Read(torch.arange(4), None)], 2, 2, True, False, slice_fn)

    assert calls == [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)]


def test_padding_a_joined_batch_is_known():
    (found,) = rounds(
        [Read(torch.tensor([0, 1, 2, 0]), StepRows((3,), (4,)))], 2, 2, True, False, slice_tensors
    )

    assert lists(found.parts) == [[0, 1], [2, 0]]
    assert found.fill == ((2, 1), (2, 2))


def test_what_cannot_be_padded_is_told():
    def slice_fn(batch, rows, process_index, num_processes):
        return batch

    with pytest.raises(ValueError, match=r"cannot pad a batch of 1 rows to 2.*even_batches=False"):
        rounds([Read({"name": "a"}, None)], 2, None, True, False, slice_fn)
