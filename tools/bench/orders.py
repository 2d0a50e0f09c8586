"""Shuffled orders that are computed from a key: the start of a shard, its memory, and the cost per sample.

Nothing else here draws the order of 10 billion samples: torch's would take 80 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_data import prepare_data_loader, skip_first_batches

from .loaders import _high_water_mark
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["measure_keyed", "measure_keyed_peak", "order_rows"]

LENGTH, WORLD, BATCH = 10**10, 1024, 8
BEGIN_LIMIT_MS, SEEK_LIMIT, MEMORY_LIMIT_MB = 1.0, 1.5, 1.0
# One process computes as many entries as torch draws; one of eight an eighth of them.
WALKED, WALK_LIMIT, SHARE_LIMIT = 4_000_000, 3.0, 1.0


def order_rows(*, quick: bool = False) -> list[Row]:
    """Compare keyed orders with those of torch."""
    samples: Samples = run_workers("orders:measure_keyed", 1, rounds=3 if quick else 9)
    compared = ratios(samples)
    shared = f"shard of 1 rank of {WORLD} of 10 billion samples, keyed"
    walked = f"all indices of {WALKED // 10**6} million samples"
    base = f"{1e9 * median(samples[BASELINE]) / WALKED:.0f} ns per sample"
    begin_ms = 1e3 * median(samples["begin"])
    seek = ratios(samples, over="begin")["seek"].median
    peak: int = run_workers("orders:measure_keyed_peak", 1)
    return [
        Row(f"{shared}: time to its first batch", begin_ms, BEGIN_LIMIT_MS, "ms"),
        Row(f"{shared}: the same after skipping 90 % / at the start", seek, SEEK_LIMIT),
        Row(f"{shared}: peak memory of 100,000 batches of indices", peak / 1e6, MEMORY_LIMIT_MB, "MB"),
        Row(
            f"{walked}, 1 process: time of a keyed order / torch's",
            compared["1"].median,
            WALK_LIMIT,
            noise=compared[CONTROL],
            base=base,
        ),
        Row(
            f"{walked}, 1 rank of 8: time of a keyed order / torch's",
            ratios(samples, over="torch, 8")["8"].median,
            SHARE_LIMIT,
        ),
    ]


def measure_keyed(rank: int, size: int, rounds: int) -> Samples:
    """Time the start of a shard, and iterating all of it; runs in a worker."""
    torch.set_num_threads(1)
    huge = _loader(LENGTH, WORLD)
    late = skip_first_batches(huge, int(0.9 * len(huge)))
    contestants: dict[str, Callable[[], int]] = {
        BASELINE: _walk("torch", 1),
        CONTROL: _walk("torch", 1),
        "1": _walk("keyed", 1),
        "torch, 8": _walk("torch", 8),
        "8": _walk("keyed", 8),
        "begin": partial(_first, huge),
        "seek": partial(_first, late),
    }
    if contestants[BASELINE]() != contestants["1"]():
        raise RuntimeError("the two orders do not have the same samples")
    return interleave({name: timed(walk, 1) for name, walk in contestants.items()}, rounds=rounds, warmup=1)


def measure_keyed_peak(rank: int, size: int) -> int:
    """Return the growth in bytes of this process's peak memory over a shard; runs in a worker."""
    torch.set_num_threads(1)
    _first(_loader(10**6, 8))  # what is loaded once is no cost of the samples
    before = _high_water_mark()
    for _ in islice(_loader(LENGTH, WORLD).batch_sampler, 100_000):
        pass
    return _high_water_mark() - before


def _loader(length: int, world: int, order: Any = "keyed") -> Any:
    loader: Any = DataLoader(range(length), BATCH, shuffle=True)  # type: ignore[arg-type]
    return prepare_data_loader(loader, num_processes=world, process_index=world // 2, order=order)


def _first(loader: Any) -> int:
    """Return the first index of an iteration; each sample is its index."""
    batches = iter(loader)
    (index, *_) = next(batches)
    batches.close()
    return int(index)


def _walk(order: str, world: int) -> Callable[[], int]:
    """Return a function that iterates all indices of the middle rank and returns their sum."""
    loader = _loader(WALKED, world, order)
    return lambda: sum(map(sum, loader.batch_sampler))
