"""The clock gives each moment to one part."""

import sys
import threading
import time

from accel.observe.statistics.clock import MANY_NOTES, OWN_GRADIENTS_READY, Clock


def noted(*notes):
    """A clock with these notes, which are parts and times in turn."""
    clock = Clock()
    for what, seconds in zip(notes[::2], notes[1::2], strict=True):
        clock.note((what, seconds, threading.get_ident()))
    return clock


def seconds_of(clock):
    clock.now = lambda: 100.0
    return {part: seconds for part, seconds in clock.read().items() if seconds}


def test_what_is_nested_is_counted_once():
    clock = Clock()
    before = time.perf_counter()
    with clock.timed("forward"):
        inside = time.perf_counter()
        time.sleep(0.01)
        with clock.timed("collectives"):
            time.sleep(0.02)
        assert clock.current == "forward"
        time.sleep(0.01)
    assert clock.current == "other"
    least = time.perf_counter() - inside
    seconds = clock.read()
    most = time.perf_counter() - before
    assert seconds["forward"] >= 0.02
    assert seconds["collectives"] >= 0.02
    assert least <= sum(seconds.values()) <= most


def test_parts_add_up_to_the_whole():
    clock = noted("data", 10, None, 11, "forward", 13, "collectives", 16, None, 20, None, 25)
    assert seconds_of(clock) == {"data": 1, "forward": 8, "collectives": 4, "other": 77}


def test_a_checkpoint_has_all_of_its_time():
    clock = noted("data", 10, None, 11, "checkpoint", 12, "collectives", 13, "checkpoint", 14, None, 15)
    assert clock.current == "checkpoint"
    clock.note((None, 16, threading.get_ident()))
    clock.note((None, 20, threading.get_ident()))
    assert seconds_of(clock) == {"data": 1, "checkpoint": 8, "other": 81}


def test_the_wait_begins_once_the_own_gradients_are_ready():
    clock = noted("backward", 10, OWN_GRADIENTS_READY, 13, None, 20)
    assert seconds_of(clock) == {"backward": 3, "collectives": 7, "other": 80}
    # a callback of a pass that nobody times
    assert seconds_of(noted("data", 10, OWN_GRADIENTS_READY, 13, None, 20)) == {"data": 10, "other": 80}


def test_it_starts_with_the_first_batch_or_pass():
    # the batch that is read while a checkpoint is loaded is none
    before = "collectives", 1, None, 2, "checkpoint", 3, "data", 4, None, 5, None, 6
    assert seconds_of(noted(*before)) == {}
    assert seconds_of(noted(*before, "data", 90, None, 91)) == {"data": 1, "other": 9}


def test_what_began_before_ends_nothing():
    assert seconds_of(noted(None, 1, "data", 90, None, 91)) == {"data": 1, "other": 9}


def test_other_threads_change_nothing():
    clock = Clock()
    clock.begin("data")

    def run():
        clock.begin("checkpoint")
        clock.note(("checkpoint", clock.now(), threading.get_ident()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert clock.current == "data"


def test_what_takes_notes_takes_one_at_each_call():
    clock = Clock()
    clock.now = iter([10.0, 13.0, 20.0, 50.0]).__next__
    begin, wait, end = (clock.noting(what) for what in ("backward", OWN_GRADIENTS_READY, None))
    assert clock.notes.qsize() == 0
    for take_note in (begin, wait, end, begin):
        take_note()
    assert clock.notes.qsize() == 4
    assert seconds_of(clock) == {"backward": 53, "collectives": 7, "other": 30}


def test_a_note_is_of_the_thread_that_takes_it():
    clock = Clock()
    clock.begin("data")
    take_note = clock.noting("checkpoint")
    thread = threading.Thread(target=take_note)
    thread.start()
    thread.join()
    assert clock.current == "data"
    take_note()
    assert clock.current == "checkpoint"


def test_to_take_a_note_calls_no_python_function():
    events = []
    take_note = Clock().noting("backward")
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        take_note()
    finally:
        sys.setprofile(before)
    assert "call" not in events


def test_a_signal_may_come_while_notes_are_added_up():
    clock = Clock()
    add, read = clock._add, []

    def interrupted(what, seconds):
        read.append(clock.read())  # as the handler of a signal that ends training does
        add(what, seconds)

    clock._add = interrupted
    with clock.timed("forward"):
        pass
    assert clock.current == "other"
    assert len(read) == 2


def test_notes_do_not_pile_up():
    clock = Clock()
    for _ in range(MANY_NOTES):
        with clock.timed("forward"):
            pass
    assert clock.notes.qsize() <= MANY_NOTES
    assert clock.current == "other"


def test_an_accelerator_is_awaited_where_that_is_asked_for():
    waits = []
    clock = Clock(lambda: waits.append(time.perf_counter()))
    with clock.timed("forward"):
        pass
    assert len(waits) == 2
    thread = threading.Thread(target=clock.now)
    thread.start()
    thread.join()
    assert len(waits) == 2
