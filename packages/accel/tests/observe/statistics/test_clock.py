"""The clock gives each moment to one part."""

import threading
import time

from accel.observe.statistics.clock import Clock


def noted(*notes):
    """A clock with these notes, which are parts (those with a minus end) and times in turn."""
    clock = Clock()
    for what, seconds in zip(notes[::2], notes[1::2], strict=True):
        clock.note((what.strip("-"), not what.startswith("-"), seconds, threading.get_ident()))
    return clock


def take(clock, part, begins):
    clock.note((part, begins, clock.now(), threading.get_ident()))


def current(clock):
    clock.add_up()
    return clock._open[-1]


def seconds_of(clock):
    clock.now = lambda: 100.0
    return {part: seconds for part, seconds in clock.read().items() if seconds}


def test_what_is_nested_is_counted_once():
    clock = Clock()
    before = time.perf_counter()
    take(clock, "forward", True)
    inside = time.perf_counter()
    time.sleep(0.01)
    take(clock, "collectives", True)
    time.sleep(0.02)
    take(clock, "collectives", False)
    assert current(clock) == "forward"
    time.sleep(0.01)
    take(clock, "forward", False)
    assert current(clock) == "other"
    least = time.perf_counter() - inside
    seconds = clock.read()
    most = time.perf_counter() - before
    assert seconds["forward"] >= 0.02
    assert seconds["collectives"] >= 0.02
    assert least <= sum(seconds.values()) <= most


def test_parts_add_up_to_the_total():
    notes = "data", 10, "-data", 11, "forward", 13, "collectives", 16, "-collectives", 20, "-forward", 25
    assert seconds_of(noted(*notes)) == {"data": 1, "forward": 8, "collectives": 4, "other": 77}


def test_a_model_may_call_another_one():
    clock = noted("forward", 10, "forward", 11, "-forward", 12)
    assert current(clock) == "forward"
    clock.note(("forward", False, 20, threading.get_ident()))
    assert current(clock) == "other"
    assert seconds_of(clock) == {"forward": 10, "other": 80}


def test_a_checkpoint_has_all_of_its_time():
    clock = noted("data", 10, "-data", 11, "checkpoint", 12, "data", 13, "checkpoint", 14, "-checkpoint", 15)
    clock.note(("data", False, 16, threading.get_ident()))
    assert current(clock) == "checkpoint"
    clock.note(("checkpoint", False, 20, threading.get_ident()))
    assert seconds_of(clock) == {"data": 1, "checkpoint": 8, "other": 81}


def test_it_starts_with_the_first_batch_or_pass():
    # the batch that is read while a checkpoint is loaded is none
    before = "checkpoint", 3, "data", 4, "-data", 5, "-checkpoint", 6
    assert seconds_of(noted(*before)) == {}
    assert seconds_of(noted(*before, "data", 90, "-data", 91)) == {"data": 1, "other": 9}


def test_what_began_before_ends_nothing():
    assert seconds_of(noted("-forward", 1, "data", 90, "-data", 91)) == {"data": 1, "other": 9}


def test_what_an_error_left_open_ends_when_it_begins_again():
    clock = noted("backward", 10, "forward", 20, "-forward", 21, "backward", 30, "-backward", 31)
    assert current(clock) == "other"


def test_other_threads_change_nothing():
    clock = Clock()
    take(clock, "data", True)
    thread = threading.Thread(target=take, args=(clock, "checkpoint", True))
    thread.start()
    thread.join()
    assert current(clock) == "data"


def test_a_signal_may_come_while_notes_are_added_up():
    clock = Clock()
    add, read = clock._add, []

    def interrupted(*note):
        read.append(clock.read())  # as the handler of a signal that ends training does
        add(*note)

    clock._add = interrupted
    take(clock, "forward", True)
    take(clock, "forward", False)
    assert current(clock) == "other"
    assert len(read) == 2
