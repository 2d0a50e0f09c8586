from collections import Counter
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.order.layout import EpochInfo, Layout, cut, split_evenly
from accel_data.order.permutation import KeyedPermutation

layouts = st.builds(
    Layout,
    per_rank_batch=st.integers(1, 5),
    num_processes=st.integers(1, 8),
    drop_last=st.booleans(),
    even_batches=st.booleans(),
    start=st.integers(0, 30),
    balance_last_step=st.booleans(),
)


def by_hand(order, layout):
    """Return the batches of each process, cut step by step."""
    batches = [[] for _ in range(layout.num_processes)]
    for start in range(layout.start, len(order), layout.step_size):
        step = order[start : start + layout.step_size]
        if len(step) < layout.step_size and layout.drop_last:
            break
        if layout.balance_last_step and len(step) < layout.step_size:
            parts = spread_by_hand(step, layout)
        else:
            if layout.even_batches:
                step = step + list(islice(cycle(order), layout.step_size - len(step)))
            parts = [
                step[i * layout.per_rank_batch : (i + 1) * layout.per_rank_batch]
                for i in range(layout.num_processes)
            ]
        for rank, batch in enumerate(parts):
            if batch:
                batches[rank].append(batch)
    return batches


def spread_by_hand(step, layout):
    """Return the parts of a step that is not full: the smallest in which all entries are equally often."""
    count = layout.num_processes
    if not layout.even_batches:
        return [part.tolist() for part in np.array_split(np.array(step), count)]
    equal = [size for size in range(1, layout.per_rank_batch + 1) if size * count % len(step) == 0]
    size = equal[0] if equal else -(-len(step) // count)
    entries = list(islice(cycle(step), size * count))
    return [entries[i * size : (i + 1) * size] for i in range(count)]


@given(st.integers(0, 60), layouts)
def test_every_kind_of_order_is_cut_equally(length, layout):
    order = [7 * i % 101 for i in range(length)]
    expected = by_hand(order, layout)
    for rank in range(layout.num_processes):
        assert layout.batches_per_rank(length)[rank] == len(expected[rank])
        for kind in (torch.tensor(order, dtype=torch.int64), order, iter(order)):
            info = EpochInfo()
            assert list(cut(kind, layout, rank, info)) == expected[rank]
            if not hasattr(kind, "__next__"):
                assert info.num_batches == len(expected[rank]) == layout.num_batches(length, rank)


@given(st.integers(0, 60), layouts)
def test_all_processes_together_take_turns(length, layout):
    order = list(range(length))
    parts = by_hand(order, layout)
    expected = [
        parts[rank][step] for step in range(60) for rank in range(len(parts)) if step < len(parts[rank])
    ]
    for kind in (range(length), torch.arange(length), order, iter(order)):
        assert list(cut(kind, layout, None, EpochInfo())) == expected
    assert layout.num_batches(length, None) == len(expected)
    assert layout.num_batches(length, 0) == len(parts[0])


@given(st.integers(0, 60), layouts)
def test_padding_is_counted_exactly(length, layout):
    info = EpochInfo()
    taken = [list(cut(range(length), layout, rank, EpochInfo())) for rank in range(layout.num_processes)]
    list(cut(range(length), layout, 0, info))
    steps = max(map(len, taken))
    last_rows = [batches[-1] if 0 < steps == len(batches) else [] for batches in taken]
    if info.last_rows is None:
        kept = [entry for batch in last_rows for entry in batch]
        assert all(last_rows) or not steps
    else:
        assert list(map(len, last_rows)) == list(info.last_rows.rows)
        kept = [
            entry
            for batch, real in zip(last_rows, info.last_rows.real, strict=True)
            for entry in batch[:real]
        ]
    seen = sorted(entry for batches in taken for batch in batches[: steps - 1] for entry in batch) + kept
    if steps:
        assert seen == list(range(layout.start, layout.start + len(seen)))
    assert len(seen) == max(length - layout.start, 0) - (layout.remainder(length) if layout.drop_last else 0)


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_spread_step_has_no_idle_process_if_it_can(per_rank_batch, processes, data):
    remainder = data.draw(st.integers(1, per_rank_batch * processes))
    even_batches = Layout(per_rank_batch, processes, False, True, balance_last_step=True).split_step(
        list(range(remainder)), [], None
    )
    uneven = Layout(per_rank_batch, processes, False, False, balance_last_step=True).split_step(
        list(range(remainder)), [], None
    )

    assert len(uneven) == min(remainder, processes)
    assert len(even_batches) == processes
    assert len({len(part) for part in even_batches}) == 1
    assert len(even_batches[0]) <= per_rank_batch
    often = set(Counter(entry for part in even_batches for entry in part).values())
    assert len(often) == 1 if remainder % processes == 0 or remainder <= per_rank_batch else len(often) <= 2


@pytest.mark.parametrize(("count", "sizes"), [(0, (0, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (5, (2, 2, 1))])
def test_what_is_left_is_divided_as_equally_as_can_be(count, sizes):
    assert split_evenly(count, 3) == sizes


def test_a_shard_of_a_range_costs_nothing_else():
    order = range(2**50)  # neither a list nor a walk of it would end
    layout = Layout(2, 8, False, True, start=2**50 - 20)

    assert list(cut(order, layout, 3, EpochInfo())) == [[2**50 - 14, 2**50 - 13], [2, 3]]


@given(st.integers(0, 5000), layouts, st.sampled_from([1, 7, 3000]))
def test_an_order_that_is_computed_is_cut_like_its_list(length, layout, per_rank_batch):
    layout = replace(layout, per_rank_batch=per_rank_batch)
    order = KeyedPermutation(length, 3)
    for rank in (None, layout.num_processes - 1):
        assert list(cut(order, layout, rank, EpochInfo())) == list(
            cut(list(order), layout, rank, EpochInfo())
        )


def test_own_rows_do_not_keep_the_whole_order():
    order = torch.arange(1024)
    batches = cut(order, Layout(1, 64, False, True), 3, EpochInfo())
    next(batches)
    held = [value for value in batches.gi_frame.f_locals.values() if isinstance(value, torch.Tensor)]

    assert [rows.untyped_storage().nbytes() for rows in held] == [16 * 8]
