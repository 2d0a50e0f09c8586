"""An epoch of batches that a device computes on: accel's loader, which copies ahead, against a pinned one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from .devices import waiting
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["loader_rows", "measure_loader"]

LIMIT = 1.0  # of a loader with pinned memory, which does not copy ahead
BATCH, FEATURES = 64, 3 * 64 * 64  # 3 MiB in a batch
BATCHES, QUICK_BATCHES = 64, 8
WIDTH, LAYERS = 1024, 4  # of the matrix products with each batch


def loader_rows(*, quick: bool = False, device: str = "cpu") -> list[Row]:
    """Measure an epoch, copies and computing included, as a multiple of the plain pinned loader's."""
    rows = []
    batches = QUICK_BATCHES if quick else BATCHES
    for workers in (0, 2):
        samples: Samples = run_workers(
            "prefetch:measure_loader",
            1,
            num_workers=workers,
            batches=batches,
            rounds=3 if quick else 30,
            device=device,
        )
        compared = ratios(samples)
        rows.append(
            Row(
                what=f"epoch of batches of 3 MiB, {workers} workers: time / plain pinned DataLoader",
                value=compared["accel"].median,
                limit=LIMIT,
                noise=compared[CONTROL],
                base=f"{1e3 * median(samples[BASELINE]) / batches:.2f} ms per batch",
            )
        )
    return rows


def measure_loader(rank: int, size: int, num_workers: int, batches: int, rounds: int, device: str) -> Samples:
    """Time an epoch of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    count = batches * BATCH
    data = TensorDataset(torch.randn(count, FEATURES), torch.arange(count))
    make = partial(
        DataLoader,
        data,
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=device == "cuda",
    )
    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        BASELINE: partial(_moved, make(), device),
        CONTROL: partial(_moved, make(), device),
        "accel": _prepared(make(), device).__iter__,
    }
    compute = _Compute(device)
    for name, loader in loaders.items():
        if sorted(int(index) for batch in loader() for index in batch[1]) != list(range(count)):
            raise RuntimeError(f"{name} does not give each sample once")
    measures = {
        name: timed(partial(compute.epoch, loader), 1, waiting(device)) for name, loader in loaders.items()
    }
    return interleave(measures, rounds=rounds, warmup=2)


class _Compute:
    """Some matrix products per batch, which keep the device busy while the next one is read."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.first = torch.randn(FEATURES, WIDTH, device=device)
        self.others = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(LAYERS)]

    def epoch(self, loader: Callable[[], Iterable[Any]]) -> None:
        for inputs, _ in loader():
            hidden = inputs @ self.first
            for weight in self.others:
                hidden = hidden @ weight


def _moved(loader: Iterable[Any], device: str) -> Iterable[Any]:
    for inputs, labels in loader:
        yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def _prepared(loader: Any, device: str) -> Any:
    from accel import Accelerator
    from accel.utils import DataLoaderConfiguration

    configuration = DataLoaderConfiguration(non_blocking=True)
    return Accelerator(cpu=device == "cpu", dataloader_config=configuration).prepare(loader)
