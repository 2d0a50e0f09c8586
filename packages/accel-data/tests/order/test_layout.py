from collections import Counter
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.order.layout import Layout, Share, cut, spread_out
from accel_data.order.permutation import KeyedPermutation

layouts = st.builds(
    Layout,
    share=st.integers(1, 5),
    num_processes=st.integers(1, 8),
    drop_last=st.booleans(),
    even=st.booleans(),
    start=st.integers(0, 30),
    spread=st.booleans(),
)


def by_hand(order, layout):
    """Return the batches of each process, cut step by step."""
    batches = [[] for _ in range(layout.num_processes)]
    for start in range(layout.start, len(order), layout.group):
        step = order[start : start + layout.group]
        if len(step) < layout.group and layout.drop_last:
            break
        if layout.spread and len(step) < layout.group:
            parts = spread_by_hand(step, layout)
        else:
            if layout.even:
                step = step + list(islice(cycle(order), layout.group - len(step)))
            parts = [step[i * layout.share : (i + 1) * layout.share] for i in range(layout.num_processes)]
        for rank, batch in enumerate(parts):
            if batch:
                batches[rank].append(batch)
    return batches


def spread_by_hand(step, layout):
    """Return the parts of a step that is not full: the smallest in which all entries are equally often."""
    count = layout.num_processes
    if not layout.even:
        return [part.tolist() for part in np.array_split(np.array(step), count)]
    equal = [size for size in range(1, layout.share + 1) if size * count % len(step) == 0]
    size = equal[0] if equal else -(-len(step) // count)
    entries = list(islice(cycle(step), size * count))
    return [entries[i * size : (i + 1) * size] for i in range(count)]


@given(st.integers(0, 60), layouts)
def test_every_kind_of_order_is_cut_alike(length, layout):
    order = [7 * i % 101 for i in range(length)]
    expected = by_hand(order, layout)
    shares = {}
    for rank in range(layout.num_processes):
        assert layout.batches_of_each(length)[rank] == len(expected[rank])
        for kind in (torch.tensor(order, dtype=torch.int64), order, iter(order)):
            share = shares[rank] = Share()
            assert list(cut(kind, layout, rank, share)) == expected[rank]
            if not hasattr(kind, "__next__"):
                assert share.num_batches == len(expected[rank]) == layout.num_batches(length, rank)


@given(st.integers(0, 60), layouts)
def test_all_processes_together_take_turns(length, layout):
    order = list(range(length))
    parts = by_hand(order, layout)
    expected = [
        parts[rank][step] for step in range(60) for rank in range(len(parts)) if step < len(parts[rank])
    ]
    for kind in (range(length), torch.arange(length), order, iter(order)):
        assert list(cut(kind, layout, None, Share())) == expected
    assert layout.num_batches(length, None) == len(expected)
    assert layout.num_batches(length, 0) == len(parts[0])


@given(st.integers(0, 60), layouts)
def test_padding_is_counted_exactly(length, layout):
    share = Share()
    taken = [list(cut(range(length), layout, rank, Share())) for rank in range(layout.num_processes)]
    list(cut(range(length), layout, 0, share))
    steps = max(map(len, taken))
    last = [batches[-1] if 0 < steps == len(batches) else [] for batches in taken]
    if share.last is None:
        kept = [entry for batch in last for entry in batch]
        assert all(last) or not steps
    else:
        assert list(map(len, last)) == list(share.last.rows)
        kept = [entry for batch, real in zip(last, share.last.real, strict=True) for entry in batch[:real]]
    seen = sorted(entry for batches in taken for batch in batches[: steps - 1] for entry in batch) + kept
    if steps:
        assert seen == list(range(layout.start, layout.start + len(seen)))
    assert len(seen) == max(length - layout.start, 0) - (layout.tail(length) if layout.drop_last else 0)


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_spread_step_has_no_idle_process_if_it_can(share, processes, data):
    tail = data.draw(st.integers(1, share * processes))
    even = Layout(share, processes, False, True, spread=True).deal(list(range(tail)), [], None)
    uneven = Layout(share, processes, False, False, spread=True).deal(list(range(tail)), [], None)

    assert len(uneven) == min(tail, processes)
    assert len(even) == processes
    assert len({len(part) for part in even}) == 1
    assert len(even[0]) <= share
    often = set(Counter(entry for part in even for entry in part).values())
    assert len(often) == 1 if tail % processes == 0 or tail <= share else len(often) <= 2


@pytest.mark.parametrize(("count", "sizes"), [(0, (0, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (5, (2, 2, 1))])
def test_what_is_left_is_divided_as_equally_as_can_be(count, sizes):
    assert spread_out(count, 3) == sizes


def test_a_share_of_a_range_costs_nothing_else():
    order = range(2**50)  # neither a list nor a walk of it would end
    layout = Layout(2, 8, False, True, start=2**50 - 20)

    assert list(cut(order, layout, 3, Share())) == [[2**50 - 14, 2**50 - 13], [2, 3]]


@given(st.integers(0, 5000), layouts, st.sampled_from([1, 7, 3000]))
def test_an_order_that_is_computed_is_cut_like_its_list(length, layout, share):
    layout = replace(layout, share=share)
    order = KeyedPermutation(length, 3)
    for rank in (None, layout.num_processes - 1):
        assert list(cut(order, layout, rank, Share())) == list(cut(list(order), layout, rank, Share()))


def test_own_rows_do_not_keep_the_whole_order():
    order = torch.arange(1024)
    batches = cut(order, Layout(1, 64, False, True), 3, Share())
    next(batches)
    held = [value for value in batches.gi_frame.f_locals.values() if isinstance(value, torch.Tensor)]

    assert [rows.untyped_storage().nbytes() for rows in held] == [16 * 8]
