"""Complex and empty parameters, optimizers with a state from the beginning, averages of weights: each trains,
or is rejected at prepare with the reason.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.parallelism.config import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "single": dict,
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1)},
    "fsdp1, original": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True)},
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
SEVERAL = [name for name in ENGINES if name != "single"]


class Layers(torch.nn.Module):
    """Two layers that tensor parallelism can split, and a parameter next to them."""

    _tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, beside: torch.Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.beside = None if beside is None else torch.nn.Parameter(beside)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result = self.down(self.up(data).tanh())
        if self.beside is None:
            return result
        beside = torch.view_as_real(self.beside) if self.beside.is_complex() else self.beside
        return result + beside.sum()


class Complex(torch.nn.Module):
    """All parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(data.to(torch.complex64) @ self.weight).sum(-1)


def train(engine: str, kind: str) -> list[float] | str:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    models = {
        "complex": lambda: Complex(),
        "complex beside": lambda: Layers(torch.tensor([0.1 + 0.2j, 0.3 - 0.1j])),
        "empty beside": lambda: Layers(torch.empty(0, 3)),
    }
    model = models.get(kind, Layers)()
    kinds = {"Adagrad": torch.optim.Adagrad, "Rprop": torch.optim.Rprop}
    optimizer = kinds.get(kind, torch.optim.SGD)(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model) if kind == "average" else None
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        if average is not None:
            average = accelerator.prepare(average.requires_grad_(False))
    except ValueError as error:
        return str(error)
    rank, size = accelerator.engine.data_parallel.rank_and_size
    data = torch.linspace(-2, 2, 32).view(8, 4).chunk(size)[rank]
    seen = []
    for _ in range(3):
        loss = model(data).square().mean()
        accelerator.backward(loss)
        seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
            seen.append(float(accelerator.reduce(average(data).square().mean().detach(), "mean")))
        seen.append(float(accelerator.reduce(loss.detach(), "mean")))
    return seen


REFUSED = {
    ("complex", "fsdp1"): "is complex",
    ("complex", "fsdp1, original"): "is complex",
    ("complex", "tp"): "by a plan, and it has none",
    ("complex beside", "fsdp1"): "several dtypes",
    ("complex beside", "fsdp1, original"): "several dtypes",
    ("complex beside", "fsdp2"): "several dtypes",
    ("empty beside", "fsdp2"): "has no elements",
    ("Adagrad", "fsdp1"): "use_orig_params=True",
    ("Rprop", "fsdp2"): "Rprop",
    ("Rprop", "tp"): "Rprop",
}


@pytest.mark.parametrize("kind", ["complex", "complex beside", "empty beside", "Adagrad", "Rprop", "average"])
@pytest.mark.parametrize("engine", SEVERAL)
def test_it_trains_as_in_one_process_or_is_rejected(world, engine, kind):
    expected = world.run(train, "single", kind, size=1)[0]
    for found in world.run(train, engine, kind):
        if (kind, engine) in REFUSED:
            assert REFUSED[kind, engine] in found
        else:
            assert found == pytest.approx(expected, rel=1e-5)
