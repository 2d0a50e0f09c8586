"""The clock gives each moment to one part."""

import threading
import time

import pytest

from accel.observe.statistics.clock import Clock


def test_what_is_nested_is_counted_once():
    clock = Clock()
    outer = clock.switch("forward")
    begun = time.perf_counter()
    time.sleep(0.01)
    inner = clock.switch("collectives")
    time.sleep(0.02)
    clock.switch(inner)
    time.sleep(0.01)
    clock.switch(outer)
    seconds = clock.read()
    assert seconds["forward"] >= 0.02
    assert seconds["collectives"] >= 0.02
    assert sum(seconds.values()) == pytest.approx(time.perf_counter() - begun, abs=0.005)
    assert (outer, inner, clock.current) == ("other", "forward", "other")


def test_a_checkpoint_has_all_of_its_time():
    clock = Clock()
    clock.switch(clock.switch("data"))
    with clock.only("checkpoint"):
        assert clock.switch("collectives") is None
        with clock.only("checkpoint"):
            time.sleep(0.01)
        clock.switch(None)
        assert clock.current == "checkpoint"
    assert clock.current == "other"
    assert clock.read()["checkpoint"] >= 0.01


def test_it_starts_with_the_first_batch_or_pass():
    clock = Clock()
    assert clock.switch("collectives") is None
    with clock.only("checkpoint"):
        time.sleep(0.001)
    assert not any(clock.read().values())
    assert clock.switch("data") == "other"


def test_other_threads_change_nothing():
    clock, got = Clock(), []
    clock.switch("data")
    thread = threading.Thread(target=lambda: got.append(clock.switch("checkpoint")))
    thread.start()
    thread.join()
    assert got == [None]
    assert clock.current == "data"


def test_an_accelerator_is_awaited_where_that_is_asked_for():
    waits = []
    clock = Clock(lambda: waits.append(time.perf_counter()))
    clock.switch(clock.switch("forward"))
    assert len(waits) == 2
