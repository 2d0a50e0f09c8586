from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


class Loader:
    """What a gradient state reads of a prepared loader."""

    def __init__(self, end: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end
        self.remainder = remainder


def test_defaults() -> None:
    state = GradientState()

    assert state.initialized
    assert (state.num_steps, state.plugin_kwargs) == (1, {})
    assert (state.adjust_scheduler, state.sync_with_dataloader, state.sync_each_batch) == (True, True, False)
    assert state.step_scheduler_per_process
    assert state.sync_gradients
    assert not state.is_xla_gradients_synced
    assert (state.in_dataloader, state.active_dataloader, state.dataloader_references) == (False, None, [])
    assert (state.end_of_dataloader, state.remainder) == (False, -1)


def test_plugin_sets_the_window() -> None:
    plugin = GradientAccumulationPlugin(
        num_steps=4,
        adjust_scheduler=False,
        sync_with_dataloader=False,
        sync_each_batch=True,
        step_scheduler_per_process=False,
    )
    state = GradientState(plugin)

    assert state.num_steps == 4
    assert (state.adjust_scheduler, state.sync_with_dataloader, state.sync_each_batch) == (False, False, True)
    assert not state.step_scheduler_per_process


def test_bare_state_is_a_handle_on_the_newest() -> None:
    first = GradientState.new(GradientAccumulationPlugin(num_steps=2))
    handle = GradientState()
    first._set_sync_gradients(False)

    assert handle.num_steps == 2
    assert not handle.sync_gradients

    second = GradientState.new(GradientAccumulationPlugin(num_steps=8))

    assert GradientState().num_steps == 8
    assert (first.num_steps, second.num_steps) == (2, 8)


def test_states_live_side_by_side() -> None:
    first, second = GradientState.new(), GradientState.new(GradientAccumulationPlugin(num_steps=2))
    loader = Loader(end=True, remainder=3)
    first._add_dataloader(loader)
    second._set_sync_gradients(False)

    assert (first.sync_gradients, second.sync_gradients) == (True, False)
    assert (first.end_of_dataloader, second.end_of_dataloader) == (True, False)
    assert (first.remainder, second.remainder) == (3, -1)


def test_same_plugin_again_is_a_handle_and_another_makes_a_state() -> None:
    first = GradientState(GradientAccumulationPlugin(num_steps=2))
    again = GradientState(GradientAccumulationPlugin(num_steps=2))
    other = GradientState(GradientAccumulationPlugin(num_steps=3))
    first._set_sync_gradients(False)

    assert not again.sync_gradients
    assert other.sync_gradients
    assert (first.num_steps, other.num_steps) == (2, 3)


def test_plugin_kwargs_may_be_changed_in_place() -> None:
    state = GradientState.new(GradientAccumulationPlugin(num_steps=2))
    GradientState().plugin_kwargs.update({"num_steps": 5})

    assert state.num_steps == 5


def test_innermost_loader_is_the_active_one() -> None:
    state, train, evaluation = GradientState(), Loader(end=False), Loader(end=True, remainder=2)
    state._add_dataloader(train)
    state._add_dataloader(evaluation)

    assert state.active_dataloader is evaluation
    assert state.dataloader_references == [train, evaluation]
    assert (state.end_of_dataloader, state.remainder) == (True, 2)

    state._remove_dataloader(evaluation)

    assert state.active_dataloader is train
    assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (True, False, -1)

    state._remove_dataloader(train)

    assert not state.in_dataloader


def test_outer_loader_may_end_first_and_unknown_ones_do_nothing() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    state._remove_dataloader(outer)
    state._remove_dataloader(Loader())

    assert state.dataloader_references == [inner]


def test_one_loader_iterated_twice_needs_two_ends() -> None:
    state, loader, other = GradientState(), Loader(), Loader()
    for noted in (loader, other, loader):
        state._add_dataloader(noted)
    state._remove_dataloader(loader)

    assert state.dataloader_references == [loader, other]


def test_loaders_are_not_kept_alive() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    dead = weakref.ref(inner)
    del inner
    gc.collect()

    assert dead() is None
    assert state.active_dataloader is outer
    assert state.dataloader_references == [outer]


def test_references_can_be_set() -> None:
    state, loader = GradientState(), Loader()
    state.dataloader_references = [None, loader]

    assert state.dataloader_references == [loader]

    state.dataloader_references = []

    assert state.active_dataloader is None


def test_a_new_micro_batch_has_no_reduced_xla_gradients() -> None:
    state = GradientState()
    state.is_xla_gradients_synced = True

    assert GradientState().is_xla_gradients_synced

    state._set_sync_gradients(True)

    assert not state.is_xla_gradients_synced


def test_reset_forgets_the_newest_but_not_the_handles() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    GradientState._reset_state()

    assert GradientState._shared_state == {}
    assert not state.initialized
    assert state.num_steps == 2
    assert GradientState().num_steps == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda handles: pickle.loads(pickle.dumps(handles))])
def test_handles_that_are_copied_together_stay_on_one_state(copied: Any) -> None:
    state, loader = GradientState(GradientAccumulationPlugin(num_steps=2)), Loader()
    state._add_dataloader(loader)
    first, second = copied([state, GradientState()])
    first._set_sync_gradients(False)

    assert not second.sync_gradients
    assert second.num_steps == 2
    assert second.active_dataloader is None
    assert state.sync_gradients
    assert state.active_dataloader is loader


def test_repr_names_the_window() -> None:
    assert repr(GradientState()).splitlines() == [
        "Sync Gradients: True",
        "At end of current dataloader: False",
        "Extra samples added: -1",
        "Gradient accumulation plugin: {}",
    ]
