"""A log call of five numbers to the built-in tracker, whose file has each line when the call returns.

By hand, the same is `json.dumps` and one `os.write`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["log_row", "measure_logs"]

LIMIT_US = 20.0
CALLS = 200  # a turn, some milliseconds
VALUES = {"loss": 2.3125, "accuracy": 0.71, "lr": 3e-4, "grad_norm": 1.07, "tokens": 40960}


def log_row(*, quick: bool = False) -> Row:
    """Measure `accelerator.log` with only the built-in tracker."""
    samples: Samples = run_workers("tracking:measure_logs", 1, rounds=20 if quick else 300)
    return Row(
        what="log of five numbers to the built-in tracker (JSON lines): time of a call",
        value=1e6 * median(samples["accel"]),
        limit=LIMIT_US,
        unit="us",
        noise=ratios(samples)[CONTROL],
        base=f"{1e6 * median(samples[BASELINE]):.1f} us",
    )


def measure_logs(rank: int, size: int, rounds: int) -> Samples:
    """Time one call of each contestant; runs in a worker."""
    from accel import Accelerator

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("run")
        with open(Path(folder) / "by_hand.jsonl", "ab", buffering=0) as file:
            by_hand = _by_hand(file.fileno())
            calls: dict[str, Callable[[], None]] = {
                BASELINE: by_hand,
                CONTROL: by_hand,
                "accel": partial(accelerator.log, VALUES, step=7),
            }
            measures = {name: timed(call, CALLS) for name, call in calls.items()}
            samples = interleave(measures, rounds=rounds, warmup=5)
        accelerator.end_training()
        _check_lines(Path(folder) / "run.jsonl", (CALLS + 1) * (rounds + 5))
    return samples


def _by_hand(file: int) -> Callable[[], None]:
    def log() -> None:
        line = {"time": round(time.time(), 3), "step": 7, "values": VALUES}
        os.write(file, f"{json.dumps(line)}\n".encode())

    return log


def _check_lines(path: Path, count: int) -> None:
    """Every call must have written its numbers."""
    lines = path.read_text().splitlines()
    if len(lines) != count or any(json.loads(line)["values"] != VALUES for line in lines):
        raise RuntimeError(f"{path.name} has {len(lines)} lines of {count}, or other numbers")
