import random
import threading
import time
from typing import NamedTuple

import numpy
import pytest
import torch

from accel_data.loader.read_ahead import RandomUse, read_ahead
from accel_data.order.global_order import IsolatedRNG

CPU = torch.device("cpu")


class Item(NamedTuple):
    number: int
    last: bool


class Source:
    """Counts its calls and notes the threads that make them."""

    def __init__(self, length, told=True, work=lambda number: None):
        self.length = length
        self.told = told
        self.work = work
        self.calls = 0
        self.threads = []

    def __call__(self):
        number, self.calls = self.calls, self.calls + 1
        self.threads.append(threading.get_ident())
        self.work(number)
        if number == self.length:
            return None
        return Item(number, self.told and number == self.length - 1)

    def reaches(self, calls):
        """Wait until there have been so many calls."""
        until = time.monotonic() + 10
        while self.calls < calls and time.monotonic() < until:
            time.sleep(0.001)
        return self.calls >= calls


def readers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-data")]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_all_come_in_order(length, told):
    source = Source(length, told and length > 0)

    assert [item.number for item in read_ahead(source, CPU)] == list(range(length))
    assert source.calls == (length if source.told else length + 1)
    assert readers() == []


def test_the_next_one_is_read_while_one_is_used():
    source = Source(5)
    for item in read_ahead(source, CPU):
        assert source.reaches(min(item.number + 2, 5))
        time.sleep(0.005)
        assert source.calls <= item.number + 2  # and no further

    here = threading.get_ident()
    assert source.threads[0] == here  # who waits for it anyway
    assert here not in source.threads[1:]
    assert len(set(source.threads[1:])) == 1


def test_after_what_is_used_for_a_moment_nobody_is_woken():
    source = Source(300)
    assert [item.number for item in read_ahead(source, CPU)] == list(range(300))

    here = threading.get_ident()
    assert source.threads[1] != here  # nothing is known yet
    assert source.threads[2:].count(here) > 100  # some took longer on a busy machine
    assert readers() == []


def test_leaving_early_ends_the_thread_after_the_call_that_it_is_in():
    gate = threading.Event()
    source = Source(5, work=lambda number: number == 1 and gate.wait(10))
    items = read_ahead(source, CPU)
    next(items)
    assert source.reaches(2)
    assert readers() != []

    threading.Timer(0.02, gate.set).start()
    items.close()
    assert readers() == []
    assert source.calls == 2


def fail_at_2(number):
    if number == 2:
        raise OSError("disk is gone")


def test_an_error_comes_when_it_is_its_turn():
    items = read_ahead(Source(5, work=fail_at_2), CPU)

    assert [next(items).number, next(items).number] == [0, 1]
    with pytest.raises(OSError, match="disk is gone"):
        next(items)
    assert readers() == []


def isolate(number):
    with IsolatedRNG(number):
        torch.rand(1)


DRAWS = {
    "torch": lambda number: torch.rand(1),
    "random": lambda number: random.random(),
    "numpy": lambda number: numpy.random.rand(),
    "isolated": isolate,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_uses_the_global_generators_is_read_in_turn(kind):
    source = Source(4, work=DRAWS[kind])
    for item in read_ahead(source, CPU):
        time.sleep(0.005)
        assert source.calls == item.number + 1

    assert set(source.threads) == {threading.get_ident()}


def test_using_the_generators_is_seen():
    use = RandomUse()
    torch.Generator().manual_seed(1)
    random.Random(1).random()
    assert not use.seen()
    for draw in DRAWS.values():
        use = RandomUse()
        draw(0)
        assert use.seen()


def test_the_thread_is_set_like_the_one_that_reads():
    modes = []
    with torch.no_grad():
        list(read_ahead(Source(3, work=lambda number: modes.append(torch.is_grad_enabled())), CPU))
    list(read_ahead(Source(3, work=lambda number: modes.append(torch.is_grad_enabled())), CPU))

    assert modes == [False] * 3 + [True] * 3
