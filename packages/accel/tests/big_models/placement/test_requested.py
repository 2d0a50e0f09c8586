"""Device maps as they are requested: made by a strategy, checked against the model and the machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.big_models.placement.requested import (
    check_placement,
    find_main_device,
    make_device_map,
    offloaded_kinds,
)
from accel_state.enums import CustomDtype

pytestmark = pytest.mark.usefixtures("fresh_state")


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_strategy_makes_a_map(strategy: str) -> None:
    model = make()
    check_placement(model, made := make_device_map(model, strategy, {"cpu": 700}, None, None))
    assert made == {"": "cpu"}
    # 256 bytes each: one in memory, with room for the other, which runs there.
    assert make_device_map(model, strategy, {"cpu": 511}, None, None) == {"": "disk"}
    assert make_device_map(model, strategy, {"cpu": 511}, None, "float16") == {"": "cpu"}


def test_dtypes_of_single_weights_count() -> None:
    special = {"0.weight": CustomDtype.INT4, "1.weight": torch.int8}

    assert make_device_map(make(), "auto", {"cpu": 96}, None, None, special_dtypes=special) == {"": "cpu"}
    assert make_device_map(make(), "auto", {"cpu": 95}, None, None, special_dtypes=special) != {"": "cpu"}


def test_accelerators_are_filled_evenly_unless_they_are_to_be_filled_in_order() -> None:
    memory = {0: 600, 1: 600}

    assert make_device_map(make(), "auto", memory, None, None) == {"0": 0, "1": 1}
    assert make_device_map(make(), "sequential", memory, None, None) == {"": 0}


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="or one of auto, balanced, balanced_low_0, sequential, not 'best'"):
        make_device_map(make(), "best", None, None, None)
    with pytest.raises(ValueError, match=r"no device for 1\.weight"):
        check_placement(make(), {"0": "cpu"})
    with pytest.raises(ValueError, match="puts '0' on 'cuda:99', which does not exist"):
        check_placement(make(), {"": "cpu", "0": "cuda:99"})
    with pytest.raises(ValueError, match="main_device is 'cuda:99', which does not exist"):
        check_placement(make(), {"": "disk"}, "cuda:99")
    check_placement(make(), {"": "disk"})


@pytest.mark.parametrize(
    ("device_map", "main", "kinds"),
    [
        ({"": "disk"}, "cpu", ("disk",)),
        ({"a": "disk", "b": "cpu"}, "cpu", ("disk",)),
        ({"a": "disk", "b": "meta", "c": "cuda:1"}, "meta", ("disk", "cpu")),
        ({"a": "cpu", "b": torch.device("mps")}, "mps", ("disk",)),
    ],
)
def test_offloaded_parts_run_on_the_first_accelerator(device_map, main: str, kinds: tuple[str, ...]) -> None:
    device = find_main_device(device_map)

    assert device == torch.device(main)
    assert offloaded_kinds(device) == kinds
