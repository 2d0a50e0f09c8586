"""Filling devices with layers: sizes given by hand, so that each rule is seen by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import pytest

from accel.big_models.placement.plan import Layer, ModelLayers, Target, make_plan

DISK = Target("disk", math.inf, "disk")


def gpu(key: int, capacity: float) -> Target:
    return Target(key, capacity, "accelerator")


def cpu(capacity: float) -> Target:
    return Target("cpu", capacity, "cpu")


def layout(sizes: Sequence[float], shared: Mapping[int, Mapping[int, float]] | None = None) -> ModelLayers:
    """Make a layout of layers in a row, of which some share tensors."""
    shared = shared or {}
    layers = [Layer((str(index),), size, 0, shared.get(index, {})) for index, size in enumerate(sizes)]
    tied = dict.fromkeys(sorted(shared), sorted(shared))
    spans = [(0, len(sizes)), *((index, index + 1) for index in range(len(sizes)))]
    return ModelLayers(layers, tied, spans)


def test_devices_are_filled_in_order_and_none_is_returned_to():
    plan = make_plan(layout([4, 4, 1, 3, 1]), [gpu(0, 5), gpu(1, 5), gpu(2, 5), DISK])

    assert list(plan.targets) == [0, 1, 1, 2, 2]
    assert (plan.reserved, plan.reserved_on_cpu) == (0, 0)


def test_room_for_the_largest_offloaded_layer_is_kept_where_it_runs():
    plan = make_plan(layout([2, 2, 2, 4]), [gpu(0, 6), cpu(99)])

    assert list(plan.targets) == [0, 1, 1, 1]  # 2 + 4 fit, and 2 + 2 + 4 do not
    assert plan.reserved == 4


def test_room_is_kept_on_the_first_accelerator_in_use_alone():
    plan = make_plan(layout([3, 3, 9]), [gpu(0, 1), gpu(1, 12), gpu(2, 3), cpu(9)])

    assert list(plan.targets) == [1, 2, 3]
    assert plan.reserved == 9


def test_room_for_layers_on_the_disk_is_kept_on_the_cpu():
    plan = make_plan(layout([2, 2, 3]), [cpu(5), DISK])

    assert list(plan.targets) == [0, 1, 1]
    assert (plan.reserved, plan.reserved_on_cpu) == (0, 3)


def test_tied_layers_count_a_shared_tensor_once_and_go_to_the_place_of_the_first():
    shared = {0: {7: 3.0}, 2: {7: 3.0}}

    plan = make_plan(layout([4, 2, 4], shared), [gpu(0, 5), gpu(1, 2), DISK])
    assert list(plan.targets) == [0, 1, 0]  # 3 + 1 + 1 bytes


def test_tied_layers_that_no_device_has_room_for_each_count_their_copy():
    shared = {0: {7: 3.0}, 2: {7: 3.0}}

    plan = make_plan(layout([4, 2, 4], shared), [gpu(0, 4), gpu(1, 4), gpu(2, 4), DISK])
    assert list(plan.targets) == [0, 1, 2]


def test_tied_layers_wait_for_a_device_of_the_kind_that_has_room_for_all():
    shared = {0: {7: 3.0}, 1: {7: 3.0}}

    plan = make_plan(layout([4, 4, 1], shared), [gpu(0, 4), gpu(1, 5), gpu(2, 5), DISK])
    assert list(plan.targets) == [1, 1, 2]


def test_a_device_too_small_for_the_next_layer_takes_another_with_fallback_alone():
    layers, targets = layout([5, 2, 2]), [gpu(0, 4), gpu(1, 5), gpu(2, 4), DISK]

    assert list(make_plan(layers, targets).targets) == [1, 2, 2]
    assert list(make_plan(layers, targets, fallback=True).targets) == [1, 0, 2]


def test_layers_without_tensors_follow_the_one_before():
    assert list(make_plan(layout([0, 2, 0, 2, 0]), [gpu(0, 2), gpu(1, 2), DISK]).targets) == [0, 0, 0, 1, 1]
    assert list(make_plan(layout([0, 0]), [gpu(0, 2), DISK]).targets) == [0, 0]


def test_a_layer_that_no_device_has_room_for_is_named():
    message = re.escape("1 (6 bytes) has no room left on any device of max_memory (0: 5, cpu: 5)")
    with pytest.raises(ValueError, match=message):
        make_plan(layout([5, 6]), [gpu(0, 5), cpu(5)])
