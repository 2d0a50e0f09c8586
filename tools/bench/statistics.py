"""What statistics add to a DDP step of some milliseconds."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from .row import Row
from .step import Contestant
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["measure_statistics", "statistics_row"]

LIMIT = 1.01
BATCH, WIDTH, CLASSES = 64, 768, 10  # a step of about 5 ms on one core


def statistics_row(*, quick: bool = False) -> Row:
    """Measure a step of two processes with statistics, as a multiple of the same step without."""
    samples: Samples = run_workers("statistics:measure_statistics", 2, rounds=20 if quick else 300)
    compared = ratios(samples)
    return Row(
        what="statistics on, DDP step on 2 processes: time / off",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.2f} ms",
    )


def measure_statistics(rank: int, size: int, rounds: int) -> Samples:
    """Time one step with and without; runs in each worker."""
    from accel import Accelerator
    from accel.observe.statistics import StatisticsKwargs

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    settings = StatisticsKwargs(slow=1e9, summary=False)
    on = Accelerator(cpu=True, kwargs_handlers=[settings])
    steps = {
        BASELINE: _step(Accelerator(cpu=True)),
        CONTROL: _step(Accelerator(cpu=True)),
        "accel": _step(on),
    }
    measures = {name: timed(contestant.step, 2) for name, contestant in steps.items()}
    samples = interleave(measures, rounds=rounds, warmup=5)
    on.end_training()
    return samples


def _step(accelerator: Any) -> Contestant:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rows = [(torch.randn(WIDTH), 0) for _ in range(BATCH)]
    loader: Any = DataLoader(rows * 2000, batch_size=BATCH)  # type: ignore[arg-type]  # a list is a dataset
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        inputs, labels = batch
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, list(model.parameters()))
