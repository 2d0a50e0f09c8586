"""Parameters that a forward pass leaves gathered: what is made or clipped from them is the shards'."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from accel.accelerator import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_state.parallelism import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2)},
    "fsdp2, gathered": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, reshard_after_forward=False)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1)},
    "fsdp1, original": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True)},
}


class Layers(torch.nn.Sequential):
    """Two layers that tensor parallelism can split."""

    _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def data() -> torch.Tensor:
    return torch.linspace(-2, 2, 24).view(6, 4)


def plain_steps() -> list[float]:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(data()).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps_with_evaluations(engine: str, forgets: bool) -> tuple[list[float], list[bool]]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = accelerator.prepare(Layers())

    def evaluate() -> None:
        with torch.no_grad():
            model(data())

    evaluate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if forgets:  # as transformers' Trainer does, which evaluates and then trains
        accelerator.free_memory()
    accelerator.get_state_dict(model)  # puts the shards back into the model
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, clipped = [], []
    for _ in range(3):
        loss = model(data()).square().sum()
        accelerator.backward(loss)
        evaluate()
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.2)
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clipped.append(float(norm) > 0.2)
    return losses, clipped


@pytest.mark.parametrize("forgets", [False, True], ids=["at once", "after free_memory"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_before_an_optimizer_or_before_a_step_changes_nothing(world, engine, forgets):
    for losses, clipped in world.run(steps_with_evaluations, engine, forgets):
        assert losses == pytest.approx(plain_steps(), rel=1e-5)
        assert all(clipped)
