"""Dispatching batches that process 0 reads: dictionaries of three tensors, to two processes.

accelerate does the same work. How long process 0 takes to read the batches with the plain DataLoader, for
nobody but itself, is shown next to it: this must happen before anything can be sent.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = ["dispatch_rows", "measure_dispatch"]

BATCH, STEPS, LENGTH = 32, 64, 128  # samples, steps of an epoch, tokens of a sample
LIMIT_UNDER_ACCELERATE = 3.0


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Tokenised texts with labels, in memory."""

    def __init__(self, count: int) -> None:
        self.ids = torch.arange(count * LENGTH).view(count, LENGTH)
        self.mask = torch.ones(count, LENGTH, dtype=torch.int64)
        self.labels = torch.arange(count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def dispatch_rows(*, quick: bool = False) -> list[Row]:
    """Measure an epoch of dispatched batches against accelerate's; nothing where that is not installed."""
    if not importlib.util.find_spec("accelerate"):
        return []
    samples: Samples = run_workers("dispatch:measure_dispatch", 2, rounds=6 if quick else 60)
    alone, dispatched = (f"{1e6 * median(samples[name]) / STEPS:.0f} us" for name in (BASELINE, "accel"))
    return [
        Row(
            what=f"dispatch of dicts of 3 tensors, batch {BATCH}, 2 processes: time of accelerate / accel",
            value=ratios(samples, over="accel")["accelerate"].median,
            limit=LIMIT_UNDER_ACCELERATE,
            at_least=True,
            noise=ratios(samples)[CONTROL],
            base=f"{dispatched} per step, of which reading {alone}",
        )
    ]


def measure_dispatch(rank: int, size: int, rounds: int) -> Samples:
    """Time an epoch of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    data = Texts(BATCH * STEPS * size)
    contestants: dict[str, Any] = {BASELINE: _alone(data, rank), CONTROL: _alone(data, rank)}
    for name in ("accel", "accelerate"):
        if importlib.util.find_spec(name):
            contestants[name] = _dispatched(name, data)
    _check_same_data(contestants, size)
    measures = {name: timed(partial(_iterate, loader), 1) for name, loader in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=2)
    end_group()
    return samples


def _iterate(loader: Any) -> None:
    for _ in loader:
        pass
    dist.barrier()  # an epoch is over when all processes have theirs


def _alone(data: Texts, rank: int) -> Any:
    return DataLoader(data, BATCH) if rank == 0 else ()


def _dispatched(name: str, data: Texts) -> Any:
    config = importlib.import_module(f"{name}.utils").DataLoaderConfiguration(dispatch_batches=True)
    accelerator = importlib.import_module(name).Accelerator(cpu=True, dataloader_config=config)
    return accelerator.prepare(DataLoader(data, BATCH))


def _check_same_data(contestants: Mapping[str, Any], size: int) -> None:
    """Every epoch must have each sample once, in batches of one size, with its own tokens."""
    for name, loader in contestants.items():
        if name in (BASELINE, CONTROL):
            continue
        batches = list(loader)
        labels = torch.cat([batch["labels"] for batch in batches])
        tokens = torch.cat([batch["input_ids"] for batch in batches])
        gathered = [torch.empty_like(labels) for _ in range(size)]
        dist.all_gather(gathered, labels)
        whole = torch.equal(torch.cat(gathered).sort().values, torch.arange(BATCH * STEPS * size))
        if not whole or not torch.equal(tokens[:, 0], labels * LENGTH):
            raise RuntimeError(f"an epoch of {name} does not have each sample once")
