from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_optim.window import Window
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin


class Loader:
    """As much of a prepared loader as the window sees."""

    def __init__(self, length: int, state: GradientState) -> None:
        self.length, self.state = length, state
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self):
        self.end_of_dataloader = False
        self.state._add_dataloader(self)
        try:
            for index in range(self.length):
                self.end_of_dataloader = index == self.length - 1
                yield index
        finally:
            self.state._remove_dataloader(self)


def make(num_steps: int = 1, **options: bool) -> tuple[Window, GradientState]:
    state = GradientState.new(GradientAccumulationPlugin(num_steps=num_steps, **options))
    return Window(state), state


pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]


def test_every_micro_batch_is_a_boundary_without_accumulation() -> None:
    window, state = make()

    assert [window.advance() for _ in range(3)] == [True] * 3
    assert state.sync_gradients
    assert window.loss_scale() == 1.0


def test_boundary_at_each_num_steps() -> None:
    window, state = make(3)
    seen = []
    for _ in range(7):
        closes = window.advance()
        assert closes == state.sync_gradients == window.reduce_gradients
        seen.append((closes, window.step))

    assert seen == [
        (False, 1),
        (False, 2),
        (True, 0),
        (False, 1),
        (False, 2),
        (True, 0),
        (False, 1),
    ]
    assert window.loss_scale() == pytest.approx(1 / 3)


def test_the_end_of_the_loader_closes_the_window() -> None:
    window, state = make(4)

    assert [window.advance() for _ in Loader(6, state)] == [False, False, False, True, False, True]
    assert [window.advance() for _ in Loader(5, state)] == [False, False, False, True, True]


def test_the_end_of_the_loader_does_not_close_it_on_request() -> None:
    window, state = make(4, sync_with_dataloader=False)

    assert [window.advance() for _ in Loader(6, state)] == [False, False, False, True, False, False]
    assert [window.advance() for _ in Loader(3, state)] == [False, True, False]


def test_sync_each_batch_reduces_in_each_and_steps_at_the_boundary() -> None:
    window, state = make(3, sync_each_batch=True)
    seen = [(window.advance(), window.reduce_gradients, state.sync_gradients) for _ in range(3)]

    assert seen == [(False, True, False), (False, True, False), (True, True, True)]


def test_nested_use_counts_one_micro_batch() -> None:
    window, _ = make(4)
    with window, window:
        assert window.step == 1
        with window:
            assert window.step == 1
    with window:
        assert window.step == 2


def test_leaving_early_keeps_the_window_open() -> None:
    window, state = make(4)
    for index in Loader(10, state):
        with window:
            if index == 1:
                break

    assert (window.step, state.sync_gradients) == (2, False)
    assert not state.in_dataloader

    seen = []
    for _ in Loader(3, state):
        with window:
            seen.append(state.sync_gradients)

    assert seen == [False, True, True]


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_failed_micro_batch_is_not_counted(failing: int) -> None:
    window, state = make(3)
    for _ in range(failing):
        with window:
            pass
    before = (window.step, state.sync_gradients)
    with pytest.raises(RuntimeError, match="out of memory"), window, window:
        raise RuntimeError("out of memory")

    assert (window.step, state.sync_gradients) == before
    with window:
        assert window.step == (failing + 1) % 3


def test_a_failure_that_is_handled_inside_is_counted() -> None:
    window, _ = make(3)
    with window:
        with pytest.raises(RuntimeError), window:
            raise RuntimeError
        assert window.step == 1
    assert window.step == 1


def test_evaluation_inside_training_changes_nothing() -> None:
    window, state = make(4)
    seen = []
    for index in Loader(6, state):
        with window:
            seen.append(state.sync_gradients)
        if index == 1:
            for _ in Loader(3, state):
                assert not state.sync_gradients
            assert window.step == 2

    assert seen == [False, False, False, True, False, True]


def test_reset_forgets_the_open_window() -> None:
    window, state = make(4)
    window.advance()
    window.reset()

    assert (window.step, state.sync_gradients) == (0, True)
    assert [window.advance() for _ in range(4)] == [False, False, False, True]


def test_reset_inside_a_failing_micro_batch() -> None:
    window, state = make(4)
    window.advance()
    with contextlib.suppress(RuntimeError), window:
        window.reset()
        raise RuntimeError

    assert (window.step, state.sync_gradients) == (0, True)


def test_the_step_can_be_set_from_a_checkpoint() -> None:
    window, state = make(4)
    window.step = 2
    assert not state.sync_gradients
    assert [window.advance() for _ in range(2)] == [False, True]

    window.step = 1234  # a count over the epoch: 308 whole windows, and 2 micro-batches
    assert window.step == 2

    window.step = 8
    assert (window.step, state.sync_gradients) == (0, True)

    with pytest.raises(ValueError, match=r"cannot be negative, got -1"):
        window.step = -1


def test_num_steps_may_change_between_micro_batches() -> None:
    window, state = make(4)
    window.advance()
    window.advance()
    state.plugin_kwargs["num_steps"] = 2

    assert window.advance()
    assert window.loss_scale() == 0.5


def test_two_windows_are_independent() -> None:
    window_a, state_a = make(2)
    window_b, state_b = make(3)
    window_a.advance()
    window_b.advance()
    window_a.advance()

    assert (state_a.sync_gradients, state_b.sync_gradients) == (True, False)


@given(num_steps=st.integers(1, 6), lengths=st.lists(st.integers(1, 13), max_size=4), tail=st.booleans())
def test_every_micro_batch_is_in_one_window(num_steps: int, lengths: list[int], tail: bool) -> None:
    window, state = make(num_steps, sync_with_dataloader=tail)
    sizes, size = [], 0
    for length in lengths:
        for _ in Loader(length, state):
            size += 1
            if window.advance():
                sizes.append(size)
                size = 0
        if tail:
            assert size == 0

    assert sum(sizes) + size == sum(lengths)
    assert all(1 <= n <= num_steps for n in sizes)
    assert window.step == size


def test_state_is_read_where_it_is_published() -> None:
    # The window keeps no copy of the settings: whoever changes the state changes the window.
    window, state = make(4)

    assert not window.advance()
    state.plugin_kwargs["num_steps"] = 2
    assert window.loss_divisor() == 2
    assert window.advance()
    assert not window.advance()
    for _ in Loader(1, state):
        assert window.advance()


def test_a_number_of_micro_batches_suffices(fresh_state):
    window = Window(num_steps=3)
    closes = []
    for _ in range(6):
        with window:
            closes.append(GradientState().sync_gradients)
    assert closes == [False, False, True] * 2
    for wrong in ({}, {"num_steps": 2, "gradient_state": GradientState()}):
        with pytest.raises(ValueError, match=r"Window takes num_steps.*pass one of them"):
            Window(**wrong)
    with pytest.raises(ValueError, match="num_steps=0; it takes an integer of at least 1"):
        Window(num_steps=0)
