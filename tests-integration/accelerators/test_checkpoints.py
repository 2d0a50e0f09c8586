"""Checkpoints of what is on the device: saves in the background, and the device's random generator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel import Accelerator
from accel_world.devices import on_devices

pytestmark = pytest.mark.usefixtures("fresh_state")

SIZE, LAYERS = 512, 8  # 1 MiB for each layer


def make(device: str) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=device == "cpu")
    layers = [torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x = torch.randn(8, SIZE, device=accelerator.device)  # of the device's generator
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@on_devices
def test_a_save_in_the_background_has_the_values_of_its_call(device: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = make(device)
    folder = str(tmp_path / "state")
    step(accelerator, model, optimizer)
    for turn in range(2):  # the second save uses the memory of the first
        if device == "cuda":
            torch.cuda._sleep(200_000_000)  # so that the step before the save is late on the device
        step(accelerator, model, optimizer)
        accelerator.save_state(folder + str(turn), blocking=False)
        at_the_call = copies(model)
        moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        for _ in range(5):
            step(accelerator, model, optimizer)
        accelerator.wait_for_save()
        changed = copies(model)
        accelerator.load_state(folder + str(turn))

        assert not equal(changed, at_the_call)
        assert equal(copies(model), at_the_call)
        assert equal([optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()], moments)
        assert {parameter.device.type for parameter in model.parameters()} == {device}


@on_devices
@pytest.mark.parametrize("blocking", [True, False])
def test_training_continues_with_the_same_random_numbers(device: str, blocking: bool, tmp_path: Path) -> None:
    accelerator, model, optimizer = make(device)
    folder = str(tmp_path / "state")
    step(accelerator, model, optimizer)
    accelerator.save_state(folder, blocking=blocking)
    drawn = torch.rand(5, device=accelerator.device)
    losses = [step(accelerator, model, optimizer) for _ in range(4)]
    straight = copies(model)
    accelerator.wait_for_save()
    torch.manual_seed(99)  # of every device

    accelerator.load_state(folder)
    assert torch.equal(torch.rand(5, device=accelerator.device), drawn)
    assert equal([step(accelerator, model, optimizer) for _ in range(4)], losses)
    assert equal(copies(model), straight)


@on_devices
def test_a_new_run_continues_with_the_same_random_numbers(device: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = make(device)
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    losses = [step(accelerator, model, optimizer) for _ in range(4)]
    straight = copies(model)

    accelerator, model, optimizer = make(device)
    accelerator.load_state(str(tmp_path / "state"))
    assert equal([step(accelerator, model, optimizer) for _ in range(4)], losses)
    assert equal(copies(model), straight)
