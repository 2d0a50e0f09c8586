"""100,000 steps of a toy loop with evaluation, checkpoints and a tracker: nothing may grow with the steps.

Memory is what the operating system counts for the process (resident), read every 1,000 steps, and its growth
is the slope of the line through these (least squares), without the first three tenths (six saves): caches
and memory pools fill there. A leak is as steep in the rest. Files, threads and times count from the second
tenth on. The time of steps is taken as a multiple of plain PyTorch's just after them, as no machine is
equally fast for minutes.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .row import Row
from .workers import run_workers

__all__ = ["long_run_rows", "measure_long_run"]

STEPS, QUICK_STEPS = 100_000, 5_000
PLAIN_STEPS = 500  # of plain PyTorch after each epoch
EVERY = 1_000  # steps of an epoch, and between two readings
WIDTH, BATCH = 16, 4
LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 10, 2_000, 5_000
LIMIT_KB, LIMIT_TIME = 1.0, 1.05
SKIPPED = 0.1  # of the readings: what is made once
FILLED = 0.3  # of them: by then caches and memory pools are full

Readings = dict[str, list[float]]


def long_run_rows(*, quick: bool = False) -> list[Row]:
    """Measure what a process needs more after many steps than after few."""
    steps = QUICK_STEPS if quick else STEPS
    found: Readings = run_workers("long_run:measure_long_run", 1, steps=steps)
    skipped = int(SKIPPED * len(found["steps"]))
    kept = {name: values[skipped:] for name, values in found.items()}
    filled = int(FILLED * len(found["steps"]))
    slope = linear_regression(found["steps"][filled:], found["memory"][filled:]).slope
    constant = len(set(kept["files"])) == len(set(kept["threads"])) == 1
    tenth = max(1, len(kept["steps"]) // 10)
    times = [ours / plain for ours, plain in zip(kept["seconds"], kept["plain"], strict=True)]
    loop = f"{steps:,} steps with evaluation, checkpoints and a tracker"
    return [
        Row(
            what=f"{loop}: growth of resident memory in 1,000 steps",
            value=slope,  # bytes a step are kB in 1,000
            limit=LIMIT_KB,
            unit="kB",
            condition=("as many open files and threads all the time", constant),
            base=f"{kept['memory'][0] / 1e6:.0f} MB at first",
        ),
        Row(
            what=f"{loop}: time of the last tenth / the first, each over plain PyTorch's",
            value=median(times[-tenth:]) / median(times[:tenth]),
            limit=LIMIT_TIME,
            base=f"{1e6 * median(kept['seconds']) / EVERY:.0f} us per step",
        ),
    ]


def measure_long_run(rank: int, size: int, steps: int) -> Readings:
    """Train, and read every 1,000 steps what the process has; runs in a worker."""
    from accel import Accelerator
    from accel.utils import ProjectConfiguration

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator: Any = Accelerator(cpu=True, log_with="jsonl", project_config=project)
        accelerator.init_trackers("run")
        model = _model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
        loaders = [DataLoader(_rows(count), BATCH, shuffle=count == EVERY) for count in (EVERY, 20)]
        model, optimizer, schedule, loader, evaluation = accelerator.prepare(
            model, optimizer, schedule, *loaders
        )
        plain_steps = _plain()
        names = ("steps", "seconds", "plain", "memory", "files", "threads")
        # All their memory before the first step: lists that grow would count as growth of the loop.
        found = {name: array("d", bytes(8 * (steps // EVERY))) for name in names}
        step = 0
        for reading in range(steps // EVERY):
            start = time.perf_counter()
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                if step % LOG_EVERY == 0:
                    accelerator.log({"loss": loss, "lr": schedule.get_last_lr()[0]}, step=step)
            found["seconds"][reading] = time.perf_counter() - start
            found["plain"][reading] = plain_steps()
            if step % EVALUATE_EVERY == 0:
                accelerator.log({"accuracy": _accuracy(accelerator, model, evaluation)}, step=step)
            if step % SAVE_EVERY == 0:
                accelerator.save_state()
            for name, value in {"steps": step, **_reading()}.items():
                found[name][reading] = value
        accelerator.end_training()
    return {name: values.tolist() for name, values in found.items()}


def _plain() -> Callable[[], float]:
    """Return what times plain steps of the same model, which keep no more than they had before."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(2, (BATCH,))

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(PLAIN_STEPS):
            F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    return measure


def _model() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def _rows(batches: int) -> TensorDataset:
    count = batches * BATCH
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(2, (count,)))


def _accuracy(accelerator: Any, model: Any, loader: Any) -> float:
    model.eval()
    hits = []
    with torch.no_grad():
        for inputs, labels in loader:
            hits.append(accelerator.gather_for_metrics(model(inputs).argmax(-1) == labels))
    model.train()
    return torch.cat(hits).float().mean().item()


def _reading() -> dict[str, float]:
    """Return the resident bytes, the open files and the threads of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }
