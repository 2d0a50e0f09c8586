"""What the watchdog adds to a DDP step of some milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import run_workers

__all__ = ["measure_watchdog", "watchdog_row"]

LIMIT = 1.01
BATCH, WIDTH, CLASSES = 64, 768, 10  # a step of about 5 ms on one core
STEPS = 40  # in one turn of 0.2 s, within which the watchdog looks four times
TIMEOUT_S = 0.2  # which makes it look ten times as often as with the default


def watchdog_row(*, quick: bool = False) -> Row:
    """Measure a step of two processes that are watched, as a multiple of the same step without."""
    samples: Samples = run_workers("watchdog:measure_watchdog", 2, rounds=8 if quick else 60)
    compared = ratios(samples)
    return Row(
        what="watchdog on, DDP step on 2 processes: time / off",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.2f} ms",
    )


def measure_watchdog(rank: int, size: int, rounds: int) -> Samples:
    """Time the same steps with and without; runs in each worker."""
    from accel import Accelerator
    from accel_ops.debug.watchdog import Watchdog

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    step = _step(accelerator)

    def unwatched() -> float:
        return _timed(step)

    def watched() -> float:
        dog = Watchdog(accelerator.process, TIMEOUT_S)
        try:
            return _timed(step)
        finally:
            accelerator.wait_for_everyone()  # else one process would wait for the other to see it leave
            dog.stop()

    samples = interleave({BASELINE: unwatched, CONTROL: unwatched, "accel": watched}, rounds=rounds, warmup=1)
    accelerator.end_training()
    return samples


def _timed(step: Callable[[], None]) -> float:
    step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def _step(accelerator: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step
