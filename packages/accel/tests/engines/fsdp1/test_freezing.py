"""Freezing and unfreezing under FSDP version 1 with `use_orig_params`, inside windows and between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin


def engine_of(name: str) -> dict[str, Any]:
    if name == "single":
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1, use_orig_params=True, auto_wrap_policy="size_based_wrap", min_num_params=30
    )
    return {"fsdp_plugin": plugin}


def make(steps: int, name: str, count: int = 1) -> tuple[Accelerator, list[Any], list[Any]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **engine_of(name))
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        for _ in range(count)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, list(prepared[:count]), list(prepared[count:])


def data(accelerator: Accelerator, number: int) -> torch.Tensor:
    """This process's shard of a batch."""
    rank, size = accelerator.engine.data_parallel.rank_and_size
    return (torch.linspace(-2, 2, 24).view(6, 4) * (1 + number / 3)).chunk(size)[rank]


def first(accelerator: Accelerator, model: Any) -> torch.nn.Linear:
    layer: torch.nn.Linear = accelerator.unwrap_model(model)[0]
    return layer


def unfreeze_inside(name: str) -> list[float]:
    """What is unfrozen in the second of three micro-batches."""
    accelerator, [model], [optimizer] = make(3, name)
    norms = []
    for number in range(6):
        if number % 3 < 2:
            first(accelerator, model).weight.requires_grad_(number % 3 == 1)  # next to its bias
        with accelerator.accumulate(model):
            accelerator.backward(model(data(accelerator, number)).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def generator_and_discriminator(name: str) -> list[float]:
    """The discriminator is frozen while the generator has its backward pass, in every micro-batch."""
    accelerator, models, optimizers = make(2, name, 2)
    generator, discriminator = models
    norms = []
    for number in range(4):
        x = data(accelerator, number)
        with accelerator.accumulate(*models):
            discriminator.requires_grad_(False)
            accelerator.backward(discriminator(generator(x)).square().mean())
            discriminator.requires_grad_(True)
            fake = discriminator(generator(x).detach())
            accelerator.backward((fake - discriminator(x)).square().mean())
            if accelerator.sync_gradients:
                norms += [float(accelerator.clip_grad_norm_(each.parameters(), 1e9)) for each in models]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return norms


def drop_a_forward(name: str) -> list[float]:
    """Parameters are frozen, and unfrozen, after a forward pass whose loss is dropped."""
    accelerator, [model], [optimizer] = make(1, name)
    norms = []
    for number, trains in enumerate((True, False, True)):
        model(data(accelerator, number + 5))
        first(accelerator, model).requires_grad_(trains)
        accelerator.backward(model(data(accelerator, number)).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("train", [unfreeze_inside, generator_and_discriminator, drop_a_forward])
def test_what_is_trained_now_has_the_gradients_of_one_process(world, train):
    expected = world.run(train, "single", size=1)[0]

    for norms in world.run(train, "fsdp1"):
        assert norms == pytest.approx(expected, rel=1e-5)


def freeze_inside(late: bool, drops: bool) -> tuple[str, bool]:
    """Freeze before the last micro-batch, or after its loss was dropped."""
    accelerator, [model], [optimizer] = make(2, "fsdp1")
    model.zero_grad()
    before = [item.detach().clone() for item in model.parameters()]
    with accelerator.accumulate(model):
        accelerator.backward(model(data(accelerator, 0)).square().mean())
        if drops:
            model.zero_grad()
            accelerator.engine.drop_gradients()
    message = ""
    try:
        with accelerator.accumulate(model):
            loss = model(data(accelerator, 1)).square().mean()
            accelerator.unwrap_model(model)[2].bias.requires_grad_(False)
            if not late:
                loss = model(data(accelerator, 1)).square().mean()
                accelerator.backward(loss)
            optimizer.step()
    except ValueError as error:
        message = str(error)
    changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return message, changed


@pytest.mark.parametrize("late", [False, True])
def test_freezing_what_a_window_has_gradients_of_is_rejected_before_the_step(world, late):
    for message, changed in world.run(freeze_inside, late, False):
        assert "bias was frozen inside an accumulation window that has gradients of it" in message
        assert not changed


def test_gradients_that_were_dropped_keep_nothing_from_being_frozen(world):
    assert world.run(freeze_inside, False, True) == [("", True)] * 2


def unfreeze_and_save(folder: str) -> list[str]:
    """Unfreeze a bias, save, take a step with it, and save again."""
    accelerator, [model], [optimizer] = make(1, "fsdp1")
    bias = accelerator.unwrap_model(model)[2].bias
    messages = []
    for number, trains in enumerate((False, True)):
        bias.requires_grad_(trains)
        if trains:
            with pytest.raises(ValueError, match="save_state: ") as error:
                accelerator.save_state(folder)
            messages.append(str(error.value))
        accelerator.backward(model(data(accelerator, number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return messages


def test_a_state_of_a_part_of_a_vector_is_not_saved(world, tmp_path):
    for messages in world.run(unfreeze_and_save, str(tmp_path / "saved")):
        assert "has stepped 1 of 2 trained parameters" in messages[0]
