"""Buffers that each process has its own values of are restored per process, where parameters are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.parallelism.config import ParallelismConfig

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "ddp": dict,
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, state_dict_type="FULL_STATE_DICT")},
    "fsdp2 sharded": lambda: {"fsdp_plugin": FSDP(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")},
    "hsdp": lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, state_dict_type="FULL_STATE_DICT")},
    "fsdp1 sharded": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, state_dict_type="SHARDED_STATE_DICT")},
}


def begin(engine: str) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def train(accelerator: Accelerator, model: Any, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + accelerator.process_index)
    for _ in range(2):
        accelerator.backward(model(torch.randn(8, 3, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def evaluate(accelerator: Accelerator, model: Any) -> float:
    accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        loss = model(torch.linspace(-1, 1, 12).view(4, 3)).square().mean().item()
    accelerator.unwrap_model(model).train()
    return loss


def save_and_go_on(engine: str, folder: str) -> tuple[float, float]:
    accelerator, model, optimizer = begin(engine)
    train(accelerator, model, optimizer, 0)
    before = evaluate(accelerator, model)
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, 10)
    accelerator.load_state(folder)
    return before, evaluate(accelerator, model)


def load(engine: str, folder: str) -> float:
    accelerator, model, _ = begin(engine)
    accelerator.load_state(folder)
    return evaluate(accelerator, model)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_process_evaluates_as_before(world, tmp_path, engine):
    found = world.run(save_and_go_on, engine, str(tmp_path / "saved"))
    again = world.run(load, engine, str(tmp_path / "saved"))

    for (before, after), later in zip(found, again, strict=True):
        assert after == before
        assert later == before
    assert (found[0][0] != found[1][0]) == (engine != "ddp")  # else nothing was tested
    assert (tmp_path / "saved/buffers_1.safetensors").exists() == (engine != "ddp")


class Counter(torch.nn.Module):
    """Counts samples of kinds that each process sees in its own data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("has_seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += torch.stack([(data > 0).sum(), (data < 0).sum()]).int()
        self.has_seen |= self.seen > 12
        return self.linear(data)


def count(engine: str, folder: str) -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    model = Counter()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    train(accelerator, model, optimizer, 0)
    before = [item.tolist() for item in accelerator.unwrap_model(model).buffers()]
    accelerator.save_state(folder)
    train(accelerator, model, optimizer, 10)
    accelerator.load_state(folder)
    return before, [item.tolist() for item in accelerator.unwrap_model(model).buffers()]


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
def test_counts_are_restored_too(world, tmp_path, engine):
    found = world.run(count, engine, str(tmp_path / "saved"))

    assert found[0][0] != found[1][0]  # else nothing was tested
    for before, after in found:
        assert after == before


@pytest.mark.filterwarnings("ignore:Checkpoint .* processes:UserWarning")
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp2 sharded"])
def test_on_another_number_of_processes_all_have_the_first_ones(world, tmp_path, engine):
    found = world.run(save_and_go_on, engine, str(tmp_path / "saved"))

    assert world.run(load, engine, str(tmp_path / "saved"), size=1) == [pytest.approx(found[0][0], rel=1e-6)]
    assert (
        world.run(load, engine, str(tmp_path / "saved"), size=3) == [pytest.approx(found[0][0], rel=1e-6)] * 3
    )
