from itertools import cycle, islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_data.layout import Layout, Share, cut

layouts = st.builds(
    Layout,
    share=st.integers(1, 5),
    num_processes=st.integers(1, 8),
    drop_last=st.booleans(),
    even=st.booleans(),
    start=st.integers(0, 30),
)


def by_hand(order, layout):
    """Return the batches of each process, cut step by step."""
    batches = [[] for _ in range(layout.num_processes)]
    for start in range(layout.start, len(order), layout.group):
        step = order[start : start + layout.group]
        if len(step) < layout.group and layout.drop_last:
            break
        if layout.even:
            step = step + list(islice(cycle(order), layout.group - len(step)))
        for rank in range(layout.num_processes):
            batch = step[rank * layout.share : (rank + 1) * layout.share]
            if batch:
                batches[rank].append(batch)
    return batches


@given(st.integers(0, 60), layouts)
def test_every_kind_of_order_is_cut_alike(length, layout):
    order = [7 * i % 101 for i in range(length)]
    expected = by_hand(order, layout)
    shares = {}
    for rank in range(layout.num_processes):
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
    assert layout.num_steps(length) == len(parts[0])


@given(st.integers(0, 60), layouts)
def test_padding_is_counted_exactly(length, layout):
    share = Share()
    taken = [list(cut(range(length), layout, rank, share)) for rank in range(layout.num_processes)]
    last = [batches[-1] if batches else [] for batches in taken]
    seen = sum(len(batch) for batches in taken for batch in batches)
    if share.real is None:
        assert seen <= max(length - layout.start, 0)
    else:
        padding = sum(len(batch) - real for batch, real in zip(last, share.real, strict=True))
        assert seen - padding == length - layout.start
        kept = [entry for batch, real in zip(last, share.real, strict=True) for entry in batch[:real]]
        assert kept == list(range(length - len(kept), length))


def test_a_share_of_a_range_costs_nothing_else():
    order = range(2**50)  # neither a list nor a walk of it would end
    layout = Layout(2, 8, False, True, start=2**50 - 20)

    assert list(cut(order, layout, 3, Share())) == [[2**50 - 14, 2**50 - 13], [2, 3]]


def test_own_rows_do_not_keep_the_whole_order():
    order = torch.arange(1024)
    batches = cut(order, Layout(1, 64, False, True), 3, Share())
    next(batches)
    held = [value for value in batches.gi_frame.f_locals.values() if isinstance(value, torch.Tensor)]

    assert [rows.untyped_storage().nbytes() for rows in held] == [16 * 8]
