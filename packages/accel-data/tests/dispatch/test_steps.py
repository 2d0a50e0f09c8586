import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.dispatch.channel import NO_BATCH
from accel_data.dispatch.steps import ReadBatch, StepBuilder
from accel_data.order.layout import StepRows
from accel_ops.trees.tensors import slice_tensors


def build_steps(reads, *args):
    return list(StepBuilder(*args).of(iter(reads)))


def lists(batches):
    return [None if part is NO_BATCH else part.tolist() for part in batches]


def real_rows(found):
    """Return the rows that are no padding, in rank order."""
    real = found.step_rows.real if found.step_rows else [None] * len(found.batches)
    return [
        row
        for part, count in zip(found.batches, real, strict=True)
        if part is not NO_BATCH
        for row in part.tolist()[:count]
    ]


def test_batches_are_dealt_out_in_turn():
    reads = [ReadBatch(torch.tensor([2 * i, 2 * i + 1]), None) for i in range(4)]

    first, second = build_steps(reads, 2, 2, True, False, None)
    assert lists(first.batches) == [[0, 1], [2, 3]]
    assert lists(second.batches) == [[4, 5], [6, 7]]
    assert first.step_rows is second.step_rows is None


def test_a_missing_batch_is_the_first_one_again():
    reads = [
        ReadBatch(torch.tensor([0, 1]), None),
        ReadBatch(torch.tensor([2, 3]), None),
        ReadBatch(torch.tensor([4, 0]), StepRows((1,), (2,))),
    ]

    last = build_steps(reads, 2, 2, True, False, None)[-1]
    assert lists(last.batches) == [[4, 0], [0, 1]]
    assert last.step_rows == ((1, 0), (2, 2))
    assert lists(build_steps(reads, 2, 2, False, False, None)[-1].batches) == [[4, 0], None]
    assert len(build_steps(reads, 2, 2, True, True, None)) == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_whole_batches_of_any_size_stay_as_they_are(sizes, processes, even):
    batches = torch.arange(sum(sizes)).split(sizes)
    found = build_steps([ReadBatch(batch, None) for batch in batches], processes, None, even, False, None)

    assert [row for part in found for row in real_rows(part)] == list(range(sum(sizes)))
    batches = [batch for part in found for batch in part.batches if batch is not NO_BATCH]
    assert all(part is batch for part, batch in zip(batches, batches, strict=False))
    # What is left are full batches from the start, on the processes that would have none.
    missing = -len(batches) % processes if even else 0
    padding = batches[len(batches) :]
    start = batches[: min(processes, len(batches))]
    assert all(part is start[index % len(start)] for index, part in enumerate(padding))
    assert len(padding) == missing
    assert not even or all(len(part.batches) == processes and NO_BATCH not in part.batches for part in found)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_whole_batches_are_split(sizes, processes, even):
    data = iter(range(100))
    reads = [ReadBatch(torch.tensor([next(data) for _ in range(size)]), None) for size in sizes]
    found = build_steps(reads, processes, None, even, False, slice_tensors)

    assert len(found) == len(sizes)
    assert [row for part in found for row in real_rows(part)] == list(range(sum(sizes)))
    for part in found:
        rows = {len(batch) for batch in part.batches if batch is not NO_BATCH}
        assert not even or (len(rows) == 1 and NO_BATCH not in part.batches)


def test_a_slicing_function_gets_process_and_number():
    calls = []

    def slice_fn(batch, rows, process_index, num_processes):
        calls.append((rows, process_index, num_processes))
        return batch[rows]

    build_steps([ReadBatch(torch.arange(4), None)], 2, 2, True, False, slice_fn)

    assert calls == [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)]


def test_padding_a_joined_batch_is_known():
    (found,) = build_steps(
        [ReadBatch(torch.tensor([0, 1, 2, 0]), StepRows((3,), (4,)))], 2, 2, True, False, slice_tensors
    )

    assert lists(found.batches) == [[0, 1], [2, 0]]
    assert found.step_rows == ((2, 1), (2, 2))


def test_what_cannot_be_padded_is_reported():
    def slice_fn(batch, rows, process_index, num_processes):
        return batch

    with pytest.raises(ValueError, match=r"cannot pad a batch of 1 rows to 2.*even_batches=False"):
        build_steps([ReadBatch({"name": "a"}, None)], 2, None, True, False, slice_fn)
