"""How much of each device a model may take, and an even spread over accelerators."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from accel.utils import compute_module_sizes, get_balanced_memory, get_max_memory, infer_auto_device_map
from accel_state.devices.table import DEVICES, detect


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(count)))  # 440 bytes each


def test_what_is_free_by_default():
    memory = get_max_memory()

    assert list(memory)[-1] == "cpu"
    assert memory["cpu"] == pytest.approx(DEVICES["cpu"].free_memory(0), rel=0.5)
    assert len(memory) == 1 + (0 if detect().type == "cpu" else detect().count())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_free_on_a_gpu():
    taken = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")

    free, total = torch.cuda.mem_get_info(0)
    assert get_max_memory()[0] == pytest.approx(free, abs=2**26)
    assert free + taken.nbytes <= total


def test_text_is_read_and_devices_are_in_the_order_of_filling():
    given = {"disk": 5, "cpu": "1GB", "mps": "1KiB", 3: 7, 1: "2KB"}

    assert list(get_max_memory(given).items()) == [
        (1, 2000),
        (3, 7),
        ("mps", 1024),
        ("cpu", 10**9),
        ("disk", 5),
    ]
    assert get_max_memory({}) == {}


@pytest.mark.parametrize("limit", [0, "1MB"])
def test_a_limit_of_the_disk_alone_leaves_the_others(limit: int | str):
    given = {"disk": limit}
    memory = get_max_memory(given)

    assert list(memory) == [*get_max_memory(), "disk"]
    assert memory["cpu"] > 0
    assert given == memory
    assert infer_auto_device_map(layers(2), {"disk": 0}) == infer_auto_device_map(layers(2))


def test_text_is_replaced_in_the_dict_that_was_given():
    # As transformers' own get_max_memory does after it has called ours: min(given["cpu"], found["cpu"]).
    given = {"disk": 5, "cpu": "1GB"}

    assert min(get_max_memory(given)["cpu"], given["cpu"]) == 10**9
    assert list(given.items()) == [("disk", 5), ("cpu", 10**9)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": 5}, "the device 'gpu'; allowed: numbers of accelerators, 'mps', 'cpu', 'disk'"),
        ({0: -4}, "max_memory[0] is -4"),
        ({0: "much"}, "not 'much'"),
    ],
)
def test_what_is_no_memory_is_named(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        get_max_memory(given)


def used(model: nn.Module, memory: dict) -> list[float]:
    sizes = compute_module_sizes(model)
    device_map = infer_auto_device_map(model, memory, clean_result=False)
    return [sum(sizes[n] for n, own in device_map.items() if own == device) for device in memory]


def test_accelerators_get_even_shares_and_the_last_keeps_its_limit():
    model = layers(9)
    memory = get_balanced_memory(model, {0: 9000, 1: 9000, 2: 9000, "cpu": 10})

    assert list(memory) == [0, 1, 2, "cpu"]
    assert (memory[2], memory["cpu"]) == (9000, 10)
    assert used(model, memory) == [1320, 1320, 1320, 0]


def test_a_small_accelerator_takes_what_it_can():
    model = layers(9)

    assert used(model, get_balanced_memory(model, {0: 500, 1: 9000, 2: 9000})) == [440, 1760, 1760]


def test_the_first_accelerator_stays_free_where_the_others_suffice():
    model = layers(10)

    assert used(model, get_balanced_memory(model, {0: 9000, 1: 9000, 2: 9000}, low_zero=True)) == [
        0,
        2200,
        2200,
    ]
    assert used(model, get_balanced_memory(model, {0: 9000, 1: 1800, 2: 1800}, low_zero=True)) == [
        880,
        1760,
        1760,
    ]


def test_layers_that_stay_whole_make_larger_shares():
    model = nn.Sequential(layers(4), layers(2))

    assert get_balanced_memory(model, {0: 9000, 1: 9000})[0] == pytest.approx(1320, abs=5)
    whole = get_balanced_memory(model, {0: 9000, 1: 9000}, no_split_module_classes=["Sequential"])
    assert whole[0] == pytest.approx(2640, abs=5)  # the model itself is one layer
    assert get_balanced_memory(model, {0: 9000, 1: 9000}, dtype="float16")[0] == pytest.approx(660, abs=5)


@pytest.mark.parametrize("memory", [{"cpu": 100}, {0: 300, "cpu": 10}, {0: 300, 1: 300, "cpu": 10}])
def test_nothing_changes_with_one_accelerator_or_a_model_that_does_not_fit(memory):
    assert get_balanced_memory(layers(10), memory) == memory
