"""Weights that are elsewhere than the device that computes, large enough to be read ahead."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accel.big_models.hooks.prefetch import Prefetcher
from accel.hooks import remove_hook_from_submodules
from accel_world.devices import on_devices

WIDTH, LAYERS = 256, 6  # 256 KiB for each layer, which a thread reads ahead
META = torch.device("meta")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers).requires_grad_(False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of weights that were read ahead, as the modules take them."""
    names: list[str] = []
    plain = Prefetcher.take

    def take(self: Prefetcher, hook: Any) -> dict[str, torch.Tensor]:
        found = plain(self, hook)
        names.extend(found)
        return found

    monkeypatch.setattr(Prefetcher, "take", take)
    return names


def outputs(model: nn.Module, device: str) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.full((4, WIDTH), float(value), device=device)).cpu() for value in range(4)]


@on_devices
@pytest.mark.parametrize("place", ["cpu", "disk", "both"])
def test_offloaded_layers_are_read_ahead_and_compute_the_same(
    device: str, place: str, net: nn.Module, taken: list[str], tmp_path: Path
) -> None:
    expected = outputs(copy.deepcopy(net).to(device), device)
    model = copy.deepcopy(net)
    if place == "cpu":
        cpu_offload(model, device)
    elif place == "disk":
        disk_offload(model, tmp_path, device)
    else:
        # The first layer stays on the device, and the others take turns.
        main = 0 if device == "cuda" else "cpu"
        where = {str(index): ("cpu", "disk")[index // 2 % 2] for index in range(2, 2 * LAYERS)}
        model = dispatch_model(
            model, {"0": main, "1": main, **where}, main_device=main, offload_dir=tmp_path, force_hooks=True
        )

    found = outputs(model, device)

    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert any("weight" in name for name in taken) is (place != "cpu")  # what is in memory is there already
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-prefetch"]
    if place != "both":
        assert {parameter.device for parameter in model.parameters()} == {META}
    remove_hook_from_submodules(model)


@on_devices
def test_models_take_turns_on_the_device(device: str, net: nn.Module) -> None:
    expected = outputs(copy.deepcopy(net).to(device), device)
    first, hook = cpu_offload_with_hook(copy.deepcopy(net), device)
    second, last = cpu_offload_with_hook(copy.deepcopy(net), device, prev_module_hook=hook)
    for _ in range(2):
        for model in (first, second):
            assert all(torch.equal(*pair) for pair in zip(outputs(model, device), expected, strict=True))
            assert {parameter.device.type for parameter in model.parameters()} == {device}
        assert {parameter.device.type for parameter in first.parameters()} == {"cpu"}
        last.offload()
    assert {parameter.device.type for parameter in second.parameters()} == {"cpu"}
