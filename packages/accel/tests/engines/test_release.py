"""free_memory() lets go of all that was prepared, so that a loop can start again with smaller batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ops.memory import find_executable_batch_size
from accel_state.parallelism.config import ParallelismConfig

ENGINES: dict[str, Any] = {
    "single": dict,
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2)},
}
FITS = 4


class Net(torch.nn.Sequential):
    _tp_plan = {"0": "colwise", "2": "rowwise"}  # noqa: RUF012 - as transformers' models have it


def retry(engine: str, start: int) -> tuple[list[float], int, int]:
    """The losses of a training whose batches are too large at first, the size that fits, and models left."""
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    made: list[weakref.ref[Any]] = []

    @find_executable_batch_size(starting_batch_size=start, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> tuple[list[float], int]:
        accelerator.free_memory()
        torch.manual_seed(0)
        model: Any = Net(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        made.append(weakref.ref(model))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = TensorDataset(torch.linspace(-2, 2, 64).view(16, 4))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size))
        losses = []
        for (x,) in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            if batch_size > FITS // accelerator.engine.data_parallel.size:
                raise RuntimeError("CUDA out of memory.")
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses, batch_size

    sizes = iter([start // 2, start // 4])
    losses, size = train()
    accelerator.free_memory()
    gc.collect()
    left = sum(reference() is not None for reference in made)
    accelerator.end_training()
    return losses, size, left


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_begins_again_with_batches_that_fit(world, engine):
    size = 1 if engine == "single" else 2
    shares = 1 if engine in ("single", "tp") else 2
    (expected,) = world.run(retry, "single", FITS, size=1)

    for losses, batch_size, left in world.run(retry, engine, 4 * FITS // shares, size=size):
        assert batch_size == FITS // shares
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert left == 0
