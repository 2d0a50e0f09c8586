"""An evaluation loop: a prepared loader, and `gather_for_metrics` of predictions and labels in each step.

The baseline does the same by hand: a plain loader over one process's samples, and one
all_gather for each of the two tensors. It leaves out what follows from the last batch, which is not full.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = ["measure_metrics", "metrics_rows"]

LIMIT_UNDER_ACCELERATE = 2.0
BATCH, STEPS, WIDTH, CLASSES = 32, 32, 16, 10
MISSING = 5  # samples that the last batches lack, and that may not be counted twice


def metrics_rows(*, quick: bool = False) -> list[Row]:
    """Measure an epoch of steps against accelerate's; nothing where that is not installed."""
    if not importlib.util.find_spec("accelerate"):
        return []
    samples: Samples = run_workers("metrics:measure_metrics", 2, rounds=10 if quick else 120)
    step_us = {name: f"{1e6 * median(values) / STEPS:.0f} us" for name, values in samples.items()}
    return [
        Row(
            what="loader step and gather_for_metrics of 2 tensors, 2 processes: time of accelerate / accel",
            value=ratios(samples, over="accel")["accelerate"].median,
            limit=LIMIT_UNDER_ACCELERATE,
            at_least=True,
            noise=ratios(samples)[CONTROL],
            base=f"{step_us['accel']} per step, {step_us[BASELINE]} by hand",
        )
    ]


def measure_metrics(rank: int, size: int, rounds: int) -> Samples:
    """Time an epoch of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    count = BATCH * STEPS * size - MISSING
    data = TensorDataset(torch.randn(count, WIDTH), torch.arange(count))
    weight = torch.randn(WIDTH, CLASSES)
    contestants = {BASELINE: _by_hand(data, weight, size), CONTROL: _by_hand(data, weight, size)}
    for name in ("accel", "accelerate"):
        if importlib.util.find_spec(name):
            contestants[name] = _gathered(name, data, weight)
            seen = torch.cat(contestants[name]())
            if not torch.equal(seen, torch.arange(count)):
                raise RuntimeError(f"the labels that {name} gathers are not those of the samples, in order")
    measures = {name: timed(epoch, 1) for name, epoch in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=3)
    end_group()
    return samples


def _by_hand(data: TensorDataset, weight: torch.Tensor, size: int) -> Callable[[], list[torch.Tensor]]:
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
    # torch 2.13 renamed it, and warns on each call of the old name.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    @torch.no_grad()
    def epoch() -> list[torch.Tensor]:
        seen = []
        for inputs, labels in loader:
            for tensor in ((inputs @ weight).argmax(-1), labels):
                gathered = tensor.new_empty(size * len(tensor))
                all_gather(gathered, tensor)
            seen.append(gathered)
        return seen

    return epoch


def _gathered(name: str, data: TensorDataset, weight: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Make the loop of either library: they share one interface, and no type."""
    accelerator = importlib.import_module(name).Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(data, BATCH))

    @torch.no_grad()
    def epoch() -> list[torch.Tensor]:
        seen = []
        for inputs, labels in loader:
            predictions = (inputs @ weight).argmax(-1)
            _, gathered = accelerator.gather_for_metrics((predictions, labels))
            seen.append(gathered)
        return seen

    return epoch
