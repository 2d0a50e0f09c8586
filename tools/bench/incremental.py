"""Incremental saves: a frozen model with trained adapters, compared with saves that write everything."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .checkpoints import QUICK_LAYERS, WIDTH, _evict, _timed_save
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import run_workers

__all__ = ["incremental_rows", "measure_incremental", "measure_written"]

FEWER_LIMIT = 5.0
TIME_LIMIT = 0.5

LAYERS, RANK = 100, 8
ROUNDS, QUICK_ROUNDS = 7, 2


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of a low rank that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)


def incremental_rows(*, quick: bool = False) -> list[Row]:
    """Measure the bytes that an incremental save writes, and its time, compared with a full save."""
    layers = QUICK_LAYERS if quick else LAYERS
    what = f"incremental save_state of {layers * WIDTH * WIDTH * 4 // 2**20} MB frozen and adapters"
    written: dict[str, float] = run_workers("incremental:measure_written", 1, layers=layers)
    samples: Samples = run_workers(
        "incremental:measure_incremental", 1, layers=layers, rounds=QUICK_ROUNDS if quick else ROUNDS
    )
    compared = ratios(samples)
    shared: dict[str, Any] = {"noise": compared[CONTROL], "base": f"{median(samples[BASELINE]):.2f} s"}
    return [
        Row(
            f"{what}: bytes of a save of everything / bytes written",
            written["whole"] / written["incremental"],
            FEWER_LIMIT,
            at_least=True,
            base=f"{written['whole'] / 2**20:.0f} MiB",
        ),
        Row(f"{what}: time / save of everything", compared["cached"].median, TIME_LIMIT, **shared),
        Row(
            f"{what}, the previous one not in the system's cache: time / save of everything",
            compared["disk"].median,
            1.0,
            **shared,
        ),
    ]


def measure_written(rank: int, size: int, layers: int) -> dict[str, float]:
    """Return the bytes of files that a second save makes, without the setting and with it."""
    found = {}
    for name, incremental in (("whole", False), ("incremental", True)):
        accelerator, train = _accelerator(layers, incremental)
        with tempfile.TemporaryDirectory() as base:
            earlier = Path(accelerator.save_state(f"{base}/0"))
            train()
            later = Path(accelerator.save_state(f"{base}/1"))
            there = {path.stat().st_ino for path in earlier.iterdir()}
            sizes = [path.stat() for path in later.iterdir()]
            found[name] = float(sum(status.st_size for status in sizes if status.st_ino not in there))
    return found


def measure_incremental(rank: int, size: int, layers: int, rounds: int) -> Samples:
    """Time saves of everything, and of what changed; runs in a worker."""
    (whole, _), (incremental, train) = _accelerator(layers, False), _accelerator(layers, True)
    with tempfile.TemporaryDirectory() as base:
        earlier = Path(incremental.save_state(f"{base}/earlier"))
        train()

        def save(accelerator: Any, folder: Path) -> None:
            accelerator.save_state(str(folder))

        def measure(accelerator: Any, cold: bool) -> float:
            if cold:
                _evict(earlier)
            return _timed_save(partial(save, accelerator), Path(base))

        measures: dict[str, Callable[[], float]] = {
            BASELINE: partial(measure, whole, False),
            CONTROL: partial(measure, whole, False),
            "cached": partial(measure, incremental, False),
            "disk": partial(measure, incremental, True),
        }
        return interleave(measures, rounds=rounds)


def _accelerator(layers: int, incremental: bool) -> tuple[Any, Callable[[], None]]:
    """Make an Accelerator with the objects prepared; return a function that makes a step too."""
    from accel.accelerator import Accelerator
    from accel_ckpt.config import ProjectConfiguration

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(layers)))
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])

    def train() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    train()
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(incremental_saves=incremental))
    accelerator.prepare(model, optimizer)
    return accelerator, train
