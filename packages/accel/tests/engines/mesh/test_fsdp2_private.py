"""Parameters that a forward pass leaves gathered: what is made or clipped from them is the shards'."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_optim.handlers import GradScalerKwargs
from accel_state.parallelism.config import ParallelismConfig

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


def steps_with_evaluations(
    engine: str, forgets: bool, precision: str = "no"
) -> tuple[list[float], list[bool]]:
    scale = GradScalerKwargs(init_scale=64.0)  # small losses do not overflow by it
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, kwargs_handlers=[scale], **ENGINES[engine]()
    )
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


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_fp16_are_unscaled_whatever_the_model_shows_of_them(world, engine):
    for losses, clipped in world.run(steps_with_evaluations, engine, False, "fp16"):
        assert losses == pytest.approx(plain_steps(), rel=2e-2)
        assert all(clipped)


def steps_of_two_models(engine: str) -> list[float]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    teacher, student = Layers().requires_grad_(False), Layers()
    teacher, student, optimizer = accelerator.prepare(
        teacher, student, torch.optim.SGD(student.parameters(), lr=0.5)
    )
    losses = []
    for _ in range(3):  # the teacher waits for its turn
        loss = student(data()).square().sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), 0.2)
        accelerator.clip_grad_value_(student.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    losses.append(teacher(data()).square().sum().item())
    return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_has_not_run_yet_is_in_nobodys_way(world, engine):
    plain = plain_steps()
    for losses in world.run(steps_of_two_models, engine):
        assert losses == pytest.approx([*plain, plain[0]], rel=1e-5)


class Gathers(TorchDispatchMode):
    """Counts gathers of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "all_gather" in str(function) or "allgather" in str(function)
        return function(*args, **(kwargs or {}))


def gathers_of_a_teacher(version: int) -> list[int]:
    kept = {"reshard_after_forward": False if version == 2 else "SHARD_GRAD_OP"}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FSDP(fsdp_version=version, **kept))
    teacher, student = Layers().requires_grad_(False), Layers()
    teacher, student, optimizer = accelerator.prepare(
        teacher, student, torch.optim.SGD(student.parameters(), lr=0.5)
    )
    counts = []
    for _ in range(3):
        with Gathers() as gathers, torch.no_grad():
            target = teacher(data())
        counts.append(gathers.count)
        accelerator.backward((student(data()) - target).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("version", [1, 2])
def test_what_no_optimizer_steps_stays_gathered(world, version):
    for first, *later in world.run(gathers_of_a_teacher, version):
        assert first > 0
        assert later == [0, 0]
