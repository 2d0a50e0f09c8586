"""Weighted windows and clipping in fp64 under each engine, against one process that has all items at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.parallelism.config import ParallelismConfig

STEPS, WIDTH, MAX_NORM = 2, 8, 0.05
NORM_TYPES = (2.0, 1.0, float("inf"))  # one for each window
CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-12}


class Net(torch.nn.Module):
    """Two layers, which a tensor-parallel group splits by columns and by rows."""

    _no_split_modules = ("Linear",)
    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 - as transformers' models have it

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) - 0.5


def items(number: int, shard: int) -> torch.Tensor:
    """A micro-batch of a data-parallel process: none to six items."""
    count = (3 * number + 5 * shard) % 7
    generator = torch.Generator().manual_seed(100 * number + shard)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def fsdp2() -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")}


def grouped() -> dict[str, Any]:
    """One group for each layer, whose parameters are not gathered at a window's end."""
    policy = "transformer_based_wrap"
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)}


def fsdp1() -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, auto_wrap_policy="no_wrap")
    plugin.set_state_dict_type("FULL_STATE_DICT")
    return {"fsdp_plugin": plugin}


def mesh(**sizes: int) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**sizes)}


ENGINES: dict[str, tuple[int, int, Callable[[], dict[str, Any]]]] = {
    # processes, those of them with their own data, and how a script requests it
    "ddp": (4, 4, dict),
    "fsdp1": (2, 2, fsdp1),
    "fsdp2 on 2": (2, 2, grouped),
    "fsdp2 on 3": (3, 3, fsdp2),
    "hsdp": (4, 4, lambda: mesh(dp_replicate_size=2, dp_shard_size=2)),
    "tp": (2, 1, lambda: mesh(tp_size=2)),
    "fsdp2 x tp": (4, 2, lambda: mesh(dp_shard_size=2, tp_size=2)),
}


def train(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms of three windows before they were clipped, and the weights after their steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **ENGINES[kind][2]())
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    shard, shards = accelerator.engine.data_parallel.rank_and_size
    assert shards == ENGINES[kind][1]
    norms = []
    for number in range(len(NORM_TYPES) * STEPS):
        batch = items(number, shard)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch), weight=len(batch))
            if accelerator.sync_gradients:
                norm_type = NORM_TYPES[number // STEPS]
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return norms, state


def train_plainly(shards: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, norms = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for window, norm_type in enumerate(NORM_TYPES):
        numbers = range(window * STEPS, (window + 1) * STEPS)
        batch = torch.cat([items(number, shard) for number in numbers for shard in range(shards)])
        (loss_of(model, batch) / len(batch)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("kind", ENGINES)
def test_windows_and_norms_are_those_of_one_big_batch(world: Any, kind: str) -> None:
    size, shards, _ = ENGINES[kind]
    wanted, weights = train_plainly(shards)
    assert min(wanted) > MAX_NORM

    ranks = world.run(train, kind, size=size, timeout_s=100)

    for norms, _ in ranks:
        assert norms == pytest.approx(wanted, rel=1e-10)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, weights[name], **CLOSE)
    assert list(ranks[0][1]) == list(weights)
