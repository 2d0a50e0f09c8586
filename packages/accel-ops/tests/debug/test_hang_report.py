"""What is stuck, from what each process says of itself."""

from __future__ import annotations

from typing import Any

from accel_ops.debug.hang_report import _SILENT, find_stuck, report
from accel_ops.debug.progress import Status

LIMIT = 1.0
ALL = {"0": [0, 1, 2]}


def status(count: int, waited: float = 0.0, operation: str = "", **rest: Any) -> Status:
    keywords = {"place": "train.py:7 in main", "waits": bool(operation), "group": "0"} | rest
    return Status({"0": count}, operation=operation, waited_s=waited, **keywords)


def found(*statuses: Status | None, groups: dict[str, list[int]] | None = None) -> list[Any]:
    stuck = find_stuck(dict(enumerate(statuses)), groups or ALL, LIMIT)
    return [(one.group, one.number, one.arrived, one.missing) for one in stuck]


def test_who_has_begun_fewer_operations_has_not_arrived():
    waits = status(5, 1.2, "barrier")

    assert found(waits, status(4, 9.0), waits) == [("0", 5, (0, 2), (1,))]
    # Far ahead, as a broadcast does not wait: the first that is missing is what the others wait for.
    assert found(status(7, 1.2, "barrier"), status(4), status(5, 1.2)) == [("0", 5, (0, 2), (1,))]


def test_nothing_is_stuck_below_the_limit_or_where_nobody_is_ahead():
    assert found(status(5, 0.9, "barrier"), status(4), status(5, 0.9, "barrier")) == []
    assert found(status(5, 9.0), status(5, 9.0), status(5, 9.0)) == []  # all compute
    assert found(status(5, 0.1), status(4, 9.0), status(5, 0.1)) == []  # who is ahead moves
    assert found(status(5, 9.0, "backward", waits=False), status(5), status(5)) == []  # a long one


def test_all_in_an_operation_is_stuck_too():
    waits = [status(5, 1.2, name) for name in ("barrier", "barrier", "all_reduce")]

    assert found(*waits) == [("0", 5, (0, 1, 2), ())]
    assert "arrived: 0-2, but not in the same operation" in text(waits)
    assert "arrived: 0-2, which is all; it is slow, or the network is" in text([waits[0]] * 3)


def test_who_does_not_answer_or_has_left_is_missing():
    waits = status(5, 1.2, "backward", waits=False)
    left = status(5, left="of ValueError: bad sample")

    assert found(waits, None, left) == [("0", 5, (0,), (1, 2))]
    # Debug mode waits before the first operation begins.
    assert found(status(0, 1.2, "gather", group=""), status(0), status(0)) == [("0", 0, (0,), (1, 2))]
    # Nobody is in an operation: long computations next to one that has ended.
    assert found(status(5, 9.0), None, left) == []


def test_groups_are_looked_at_one_by_one():
    groups = {"0": [0, 1, 2, 3], "3": [0, 2]}
    statuses = [
        Status({"0": 1, "3": 4}, "3", "a.py:1 in f", "barrier", True, 2.0),
        Status({"0": 1, "4": 9}, "4", "a.py:2 in f", "all_reduce", True, 2.0),
        Status({"0": 1, "3": 3}, "3", "a.py:3 in f"),
        Status({"0": 1, "4": 8}, "4", "a.py:3 in f"),
    ]

    assert found(*statuses, groups=groups) == [("3", 4, (0,), (2,)), ("4", 9, (1,), (3,))]
    lines = text(statuses, groups).splitlines()
    assert lines == [
        "  Operation 4 of the group of processes 0, 2: arrived: 0; not arrived: 2",
        "  Operation 9 of the group of processes 1, 3: arrived: 1; not arrived: 3",
        "  process 0: in operation 4, barrier, at a.py:1 in f",
        "  process 1: in operation 9, all_reduce, at a.py:2 in f",
        "  process 2: after operation 3, at a.py:3 in f",
        "  process 3: after operation 8, at a.py:3 in f",
    ]


def text(statuses: list[Status | None], groups: dict[str, list[int]] | None = None, **rest: bool) -> str:
    named = dict(enumerate(statuses))
    return report(find_stuck(named, groups or ALL, LIMIT), named, groups or ALL, **rest)


def test_the_report_says_what_is_known_of_each_process():
    waits = status(5, 1.2, "gather (all_gather)")
    left = status(4, left="of ValueError: bad sample", place="train.py:9 in load")

    assert text([waits, left, None]).splitlines() == [
        "  Operation 5: arrived: 0; not arrived: 1; without answer: 2",
        "  process 0: in operation 5, gather (all_gather), at train.py:7 in main",
        "  process 1: left after operation 4 at train.py:9 in load, because of ValueError: bad sample",
        f"  process 2: {_SILENT}",
    ]
    assert text([waits, None, None], could_ask=False).splitlines() == [
        "  Operation 5: arrived: 0; unknown: 1-2",
        "  process 0: in operation 5, gather (all_gather), at train.py:7 in main",
        "  processes 1-2: unknown",
    ]


def test_equal_processes_share_a_line():
    ranks = [status(5, 1.2, "barrier") for _ in range(1000)]
    ranks[7] = status(4)
    lines = text(ranks, {"0": list(range(1000))}).splitlines()

    assert lines[0] == "  Operation 5: arrived: 0-6, 8-999; not arrived: 7"
    assert len(lines) == 3
