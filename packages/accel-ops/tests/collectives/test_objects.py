from __future__ import annotations

from collections import namedtuple

import pytest

from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_state.process.state import current_process


def gathered() -> list:
    rank = current_process().rank
    lists = gather_object([f"{rank}:{i}" for i in range(rank + 1)])
    singles = gather_object({"rank": rank})
    text = gather_object("ab")
    return [lists, singles, text]


@pytest.mark.parametrize("size", [2, 3])
def test_entries_of_all_processes_come_in_rank_order(world, size):
    for lists, singles, text in world.run(gathered, size=size):
        assert lists == [f"{rank}:{i}" for rank in range(size) for i in range(rank + 1)]
        assert singles == [{"rank": rank} for rank in range(size)]
        assert text == ["ab"] * size


def test_one_process_gets_the_same_kind_of_result():
    assert gather_object([1, 2]) == [1, 2]
    assert gather_object((1, 2)) == [1, 2]
    assert gather_object({"a": 1}) == [{"a": 1}]


def broadcast(source: int) -> list:
    rank = current_process().rank
    given = [rank, {"of": rank}] if rank == source else [None, None]
    result = broadcast_object_list(given, from_process=source)
    assert result is given
    return result


@pytest.mark.parametrize("source", [0, 1, 2])
def test_broadcast_fills_the_list_in_place(world, source):
    assert world.run(broadcast, source, size=3) == [[source, {"of": source}]] * 3


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="tuple"):
        broadcast_object_list((1,))
    with pytest.raises(ValueError, match="from_process=3"):
        broadcast_object_list([1], from_process=3)
    assert broadcast_object_list([1]) == [1]


def mismatch() -> str:
    rank = current_process().rank
    with pytest.raises(Exception, match="gather_object") as caught:
        gather_object([1]) if rank == 0 else broadcast_object_list([None])
    return str(caught.value)


def test_debug_mode_compares_the_operations(world):
    for message in world.run(mismatch, env={"ACCELERATE_DEBUG_MODE": "true"}):
        assert "broadcast_object_list" in message
        assert "test_objects.py" in message


class Unpicklable:
    def __reduce__(self):
        raise ValueError("a socket")


def unpicklable(source: int) -> list[str]:
    rank = current_process().rank
    errors = []
    objects = [Unpicklable() if rank == source else rank]
    for function, args in ((gather_object, (objects,)), (broadcast_object_list, (objects, source))):
        with pytest.raises(TypeError) as caught:
            function(*args)
        errors.append(str(caught.value))
    return [*errors, gather_object([rank])]


@pytest.mark.parametrize("source", [0, 2])
def test_what_cannot_be_pickled_raises_everywhere_and_does_not_hang(world, source):
    for gathering, broadcasting, after in world.run(unpicklable, source, size=3):
        assert f"gather_object: the objects of process {source} (ValueError: a socket)" in gathering
        assert (
            f"broadcast_object_list: the objects of process {source} (ValueError: a socket)" in broadcasting
        )
        assert after == [0, 1, 2]


def other_length() -> str:
    rank = current_process().rank
    given = [1] * (1 + rank)
    try:
        broadcast_object_list(given)
    except ValueError as error:
        return str(error)
    return str(given)


def test_lists_of_another_length_are_rejected(world):
    first, second = world.run(other_length)

    assert first == "[1]"
    assert "process 0 has 1 objects, but the list here has 2" in second


def test_a_namedtuple_is_one_entry():
    pair = namedtuple("pair", "x y")(1, 2)

    assert gather_object(pair) == [pair]
