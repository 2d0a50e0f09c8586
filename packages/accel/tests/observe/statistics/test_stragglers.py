"""Which processes are called slow, from given times."""

import pytest

from accel.observe.statistics.clock import SECTIONS
from accel.observe.statistics.stragglers import find_stragglers


def times(**seconds):
    return {**dict.fromkeys(SECTIONS, 0.0), **seconds}


def reports(rows, steps=10):
    return [{"seconds": row, "steps": steps} for row in rows]


def found(rows, slow=1.2, hides_waits=False, steps=10):
    return [
        (item.rank, item.section, round(item.ratio, 2))
        for item in find_stragglers(reports(rows, steps), slow, hides_waits)
    ]


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "other"])
def test_the_part_that_loses_most_time_is_named(part):
    usual = times(data=1.0, forward=3.0, backward=5.0, optimizer=1.0, other=1.0)
    slow = {**usual, part: usual[part] + 11.0}
    # the others wait for it, so that the step takes as long for all
    assert found([{**usual, "collectives": 11.0}, slow, {**usual, "collectives": 11.0}]) == [(1, part, 2.0)]
    assert found([{**usual, "collectives": 11.0}, slow]) == [
        (1, part, 2.0)
    ]  # of two, the faster is the usual


def test_waits_and_checkpoints_make_nobody_slow():
    usual = times(forward=1.0)
    assert found([{**usual, "collectives": 9.0}, usual, {**usual, "checkpoint": 9.0}]) == []


def test_slow_begins_above_the_limit():
    rows = [times(forward=1.0), times(forward=1.0), times(forward=1.3)]
    assert found(rows, slow=1.25) == [(2, "forward", 1.3)]
    assert found(rows, slow=1.35) == []


def test_a_wait_within_forward_is_not_taken_for_slowness():
    rows = [times(data=5.0, forward=1.0), times(data=1.0, forward=5.0), times(data=1.0, forward=5.0)]
    assert found(rows, hides_waits=True) == [(0, "data", 1.67)]
    assert found(rows, hides_waits=False) == []
    assert found([times(other=9.0), times(other=1.0), times(other=1.0)], hides_waits=True) == [
        (0, "other", 9.0)
    ]


def test_one_process_and_no_steps_are_nothing_to_compare():
    assert found([times(data=1.0)]) == []
    assert found([times(data=1.0), times(data=9.0)], steps=0) == []


def test_the_sentence_has_the_numbers():
    slow = find_stragglers(reports([times(data=0.1), times(data=0.4), times(data=0.1)]), 1.2, False)[0]
    assert slow.describe(11, 20) == (
        "Process 1 is slow: in steps 11 to 20 it needs 40.0 ms per step without its waits, 4.0 times the "
        "median (10.0 ms). Most of it is data: 40.0 ms there, and 10.0 ms on the median process."
    )
