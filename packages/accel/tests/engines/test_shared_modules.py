"""Models that share modules, or are sharded already, are rejected at prepare where they cannot be sharded."""

from __future__ import annotations

from typing import Any, ClassVar

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
SHARDED = [name for name in ENGINES if name not in ("single", "ddp")]


class Encoder(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class Model(torch.nn.Module):
    """An encoder, which may be another model's too, and a head."""

    _tp_plan: ClassVar = {"encoder.0": "colwise", "encoder.2": "rowwise"}

    def __init__(self, encoder: torch.nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.encoder, self.head = encoder, torch.nn.Linear(2, width)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(data))


def data(accelerator: Accelerator) -> torch.Tensor:
    rank, size = accelerator.engine.data_parallel.rank_and_size
    return torch.linspace(-1, 1, 16).view(4, 4).chunk(size)[rank]


def train(accelerator: Accelerator, optimizer: Any, *models: Any) -> list[float]:
    losses = []
    for _ in range(3):
        loss = sum(model(data(accelerator)).square().mean() for model in models)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def two_models(engine: str, in_turn: bool) -> list[float] | str:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    encoder = Encoder()
    first, second = Model(encoder, 2), Model(encoder, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.head.parameters()], lr=0.1)
    try:
        if in_turn:
            first = accelerator.prepare(first)
            second, optimizer = accelerator.prepare(second, optimizer)
        else:
            first, second, optimizer = accelerator.prepare(first, second, optimizer)
    except ValueError as error:
        return str(error)
    return train(accelerator, optimizer, first, second)


@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
def test_replicas_may_share_modules(world, in_turn):
    expected = world.run(two_models, "single", in_turn, size=1)[0]

    for losses in world.run(two_models, "ddp", in_turn):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("in_turn", [False, True], ids=["at once", "in turn"])
@pytest.mark.parametrize("engine", SHARDED)
def test_shards_belong_to_one_model(world, engine, in_turn):
    for text in world.run(two_models, engine, in_turn):
        assert "encoder.0" in text
        assert "one torch.nn.Module" in text


def prepare_the_unwrapped(engine: str) -> list[float] | str:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = Model(Encoder(), 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, optimizer, model)
    inner = accelerator.unwrap_model(model)
    accelerator.free_memory()
    try:
        inner, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    return train(accelerator, optimizer, inner)


@pytest.mark.parametrize("engine", SHARDED)
def test_what_is_sharded_is_prepared_again_or_rejected(world, engine):
    expected = world.run(prepare_the_unwrapped, "single", size=1)[0]
    for found in world.run(prepare_the_unwrapped, engine):
        if engine.startswith("fsdp1"):
            assert "is sharded already" in found
            assert "the model that prepare() returned" in found
        else:
            assert found == pytest.approx(expected, rel=1e-5)
