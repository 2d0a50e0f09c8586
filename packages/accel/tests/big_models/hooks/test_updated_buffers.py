"""Which of a module's buffers a forward has updated, by what it did to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel.big_models.hooks.tensors import Slot
from accel.big_models.hooks.updated_buffers import UpdatedBuffers, versioned_copy

CPU, META = torch.device("cpu"), torch.device("meta")
STORED = torch.ones(2)
Table = dict[str, Any]


def replace(table: Table) -> None:
    table["first"] = table["first"] + 1


def write_through_data(table: Table) -> None:
    table["first"].data.add_(1)


def load(updated: UpdatedBuffers) -> tuple[Table, list[Slot]]:
    """Put two buffers in their places, and watch them."""
    table: Table = {}
    slots = [Slot(table, name, name, STORED.to("meta"), None) for name in ("first", "second")]
    for slot in slots:
        table[slot.leaf] = value = versioned_copy(STORED)
        updated.watch(slot, value)
    return table, slots


def names_left(updated: UpdatedBuffers, slots: list[Slot], *, training: bool) -> list[str]:
    updated.take_from(slots, lambda slot: STORED, training=training)
    return [slot.name for slot in slots]


@pytest.mark.parametrize(
    ("write", "training"),
    [
        (lambda table: table["first"].add_(1), False),
        (lambda table: table["first"][0].fill_(3), False),
        (replace, False),
        (lambda table: table.update(first=None), False),
        (write_through_data, True),
    ],
    ids=["in place", "a part", "another tensor", "none", "through .data"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_is_written_to_leaves_the_list(
    write: Callable[[Table], object], training: bool, inference: bool
) -> None:
    updated = UpdatedBuffers()
    with torch.inference_mode(inference):
        table, slots = load(updated)
        write(table)

        assert names_left(updated, slots, training=training) == ["second"]


@pytest.mark.parametrize(
    ("write", "training"),
    [
        (lambda table: table["first"].sum(), True),
        # It costs a comparison of all values, and outside of training nobody is known to do it.
        (write_through_data, False),
    ],
    ids=["read", "through .data"],
)
def test_other_buffers_stay_in_the_list(write: Callable[[Table], object], training: bool) -> None:
    updated = UpdatedBuffers()
    table, slots = load(updated)
    write(table)

    assert names_left(updated, slots, training=training) == ["first", "second"]


def test_each_round_of_calls_is_looked_at_alone() -> None:
    updated = UpdatedBuffers()
    table, slots = load(updated)
    assert names_left(updated, slots, training=True) == ["first", "second"]

    table["first"].add_(1)  # by the user, between two forwards
    assert names_left(updated, slots, training=True) == ["first", "second"]


def test_those_that_were_taken_come_back_to_their_devices() -> None:
    updated = UpdatedBuffers()
    table, slots = load(updated)
    for buffer in table.values():
        buffer.add_(1)
    assert names_left(updated, slots, training=True) == []
    held = dict(table)

    updated.restore({"first": META, "second": META})
    assert all(table[name] is held[name] for name in held)  # their values are nowhere else
    table["second"] = torch.ones(2, device="meta")
    table["first"] = None
    updated.restore({"first": CPU, "second": META})
    assert table["first"] is None
    assert table["second"].is_meta
