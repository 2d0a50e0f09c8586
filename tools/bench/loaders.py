"""Loaders: iterating one or a stream, one rank's shard of many, a late resume, and the memory of an order.

Peers are used through what they document: `prepare` for iterating, `prepare_data_loader` and
`skip_first_batches` for one rank of many, which no other rank needs to be there for.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from . import datasets
from .row import Row
from .timing import BASELINE, CONTROL, Samples, Spread, interleave, ratios, timed
from .workers import run_workers

__all__ = [
    "CheapStream",
    "iterate_rows",
    "measure_iteration",
    "measure_peak",
    "measure_resume",
    "measure_shards",
    "measure_stream",
    "memory_rows",
    "resume_row",
    "shard_rows",
    "stream_row",
]

ITERATE_LIMIT, STREAM_LIMIT = 1.02, 1.05
EPOCH, WIDTH, BATCH = 2048, 64, 32  # of the loaders that are iterated

SHARD_LIMIT = 10.0
FLAT_LIMIT = 1.5
SHARD_LENGTH, SHARD_BATCH = 4_000_000, 8
WORLD, WORLDS = 1024, (8, 128, 8192)

RESUME_LIMIT = 5.0
RESUME_LENGTH, RESUME_PART = 1_000_000, 0.9

MEMORY_LENGTH = 100_000_000
MEMORY_LIMIT_BYTES = 4.5  # per sample: an int32, and what else there is
MEMORY_LIMIT_SHARED_BYTES = 5.5  # and the shard of one rank of eight


def iterate_rows(*, quick: bool = False) -> list[Row]:
    """Measure an epoch of a prepared loader on one process, as a multiple of the plain loader's."""
    rows = []
    for workers, kind in product((0, 2), datasets.KINDS):
        samples: Samples = run_workers(
            "loaders:measure_iteration", 1, kind=kind, num_workers=workers, rounds=10 if quick else 100
        )
        compared = ratios(samples)
        rows.append(
            Row(
                what=f"iterating a prepared loader{datasets.suffix(kind)}, 1 process, {workers} workers: "
                "time / plain DataLoader",
                value=compared["accel"].median,
                limit=ITERATE_LIMIT,
                peers=_peers(compared),
                noise=compared[CONTROL],
                base=f"{1e6 * median(samples[BASELINE]) * BATCH / EPOCH:.0f} us per batch",
            )
        )
    return rows


def measure_iteration(rank: int, size: int, kind: str, num_workers: int, rounds: int) -> Samples:
    """Time an epoch of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    data = datasets.make(kind, torch.randn(EPOCH, WIDTH), torch.arange(EPOCH))
    make = partial(
        DataLoader, data, BATCH, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    contestants = _prepared_by_all(make)
    for name, loader in contestants.items():
        _check_whole_epoch(name, (indices for _, indices in loader))
    measures = {name: timed(partial(_iterate, loader), 1) for name, loader in contestants.items()}
    return interleave(measures, rounds=rounds, warmup=3)


class CheapStream(IterableDataset[int]):
    """Numbers, which cost almost nothing: this shows the overhead of a loader per batch."""

    def __iter__(self) -> Iterator[int]:
        yield from range(EPOCH)


def stream_row(*, quick: bool = False) -> Row:
    """Measure a pass over a prepared stream of cheap samples, as a multiple of the plain loader's."""
    samples: Samples = run_workers("loaders:measure_stream", 1, rounds=10 if quick else 150)
    compared = ratios(samples)
    return Row(
        what="iterating a prepared stream of cheap samples, 1 process: time / plain DataLoader",
        value=compared["accel"].median,
        limit=STREAM_LIMIT,
        peers=_peers(compared),
        noise=compared[CONTROL],
        base=f"{1e6 * median(samples[BASELINE]) * BATCH / EPOCH:.0f} us per batch",
    )


def measure_stream(rank: int, size: int, rounds: int) -> Samples:
    """Time a pass of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    contestants = _prepared_by_all(partial(DataLoader, CheapStream(), BATCH))
    for name, loader in contestants.items():
        _check_whole_epoch(name, loader)
    measures = {name: timed(partial(_iterate, loader), 1) for name, loader in contestants.items()}
    return interleave(measures, rounds=rounds, warmup=3)


def _prepared_by_all(make: Callable[[], Any]) -> dict[str, Any]:
    contestants: dict[str, Any] = {BASELINE: make(), CONTROL: make()}
    for name in ("accel", "accelerate"):
        if importlib.util.find_spec(name):
            contestants[name] = importlib.import_module(name).Accelerator(cpu=True).prepare(make())
    if importlib.util.find_spec("lightning_fabric"):
        fabric = importlib.import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
        contestants["lightning-fabric"] = fabric.setup_dataloaders(make())
    return contestants


def _iterate(loader: Any) -> None:
    for _ in loader:
        pass


def _check_whole_epoch(name: str, batches: Iterable[torch.Tensor]) -> None:
    seen = sorted(index for indices in batches for index in indices.tolist())
    if seen != list(range(EPOCH)):
        raise RuntimeError(f"an epoch of {name} does not have each sample once")


def shard_rows(*, quick: bool = False) -> list[Row]:
    """Measure the cost of one rank's shard of an epoch, against accelerate and by the number of ranks."""
    samples: Samples = run_workers("loaders:measure_shards", 1, rounds=2 if quick else 9)
    compared = ratios(samples)
    seconds = f"{1e3 * median(samples[BASELINE]):.0f} ms"
    shuffled = f"{SHARD_LENGTH // 10**6} million samples, shuffled, batch {SHARD_BATCH}"
    noise = compared[CONTROL]
    rows = []
    if "accelerate" in compared:
        what = f"shard of 1 rank of {WORLD} ({shuffled}): time of accelerate / accel"
        faster = compared["accelerate"].median
        rows.append(Row(what, faster, SHARD_LIMIT, at_least=True, noise=noise, base=seconds))
    return rows + [
        Row(
            what=f"shard of 1 rank of {world} ({shuffled}): time / 1 rank of {WORLD}",
            value=compared[str(world)].median,
            limit=FLAT_LIMIT,
            noise=noise,
            base=seconds,
        )
        for world in WORLDS
    ]


def measure_shards(rank: int, size: int, rounds: int) -> Samples:
    """Time one rank's iteration over the batches of an epoch, including its order; runs in a worker."""
    torch.set_num_threads(1)
    contestants = {
        BASELINE: _share("accel_data", WORLD),
        CONTROL: _share("accel_data", WORLD),
        **{str(world): _share("accel_data", world) for world in WORLDS},
    }
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _share("accelerate.data_loader", WORLD)
        ours, theirs = contestants[BASELINE](), contestants["accelerate"]()
        if ours != theirs:
            raise RuntimeError(f"the shares have {ours} and {theirs} samples")
    measures = {name: timed(share, 1) for name, share in contestants.items()}
    return interleave(measures, rounds=rounds, warmup=0)


def _share(package: str, world: int) -> Callable[[], int]:
    """Return a function that reads all index batches of the middle rank and returns their length."""
    loader = importlib.import_module(package).prepare_data_loader(
        DataLoader(range(SHARD_LENGTH), SHARD_BATCH, shuffle=True),  # type: ignore[arg-type]
        num_processes=world,
        process_index=world // 2,
    )
    return lambda: sum(map(len, loader.batch_sampler))


def resume_row(*, quick: bool = False) -> Row:
    """Measure the first batch of a resumed epoch, as a multiple of a fresh epoch's first batch."""
    samples: Samples = run_workers("loaders:measure_resume", 1, rounds=5 if quick else 41)
    compared = ratios(samples)
    theirs = ratios(samples, over="accelerate, fresh") if "accelerate" in samples else {}
    return Row(
        what=f"first batch after a resume at {RESUME_PART:.0%} of {RESUME_LENGTH // 10**6} million samples, "
        "shuffled: time / first batch of an epoch",
        value=compared["accel"].median,
        limit=RESUME_LIMIT,
        peers=_peers(theirs),
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.1f} ms",
    )


def measure_resume(rank: int, size: int, rounds: int) -> Samples:
    """Time the first batch, fresh and resumed; runs in a worker."""
    torch.set_num_threads(1)
    make = partial(DataLoader, TensorDataset(torch.arange(RESUME_LENGTH)), BATCH, shuffle=True)
    skipped = int(RESUME_PART * RESUME_LENGTH / BATCH)
    ours = _prepared("accel_data", make)
    state = {**ours.state_dict(), "consumed": skipped * BATCH, "batches": skipped, "step_size": BATCH}

    def resume() -> Any:
        ours.load_state_dict(state)
        return ours

    measures: dict[str, Callable[[], float]] = {
        BASELINE: _first_batch(partial(_prepared, "accel_data", make)),
        CONTROL: _first_batch(partial(_prepared, "accel_data", make)),
        "accel": _first_batch(resume),
    }
    if importlib.util.find_spec("accelerate"):
        theirs = partial(_prepared, "accelerate.data_loader", make)
        skip = importlib.import_module("accelerate").skip_first_batches
        measures["accelerate, fresh"] = _first_batch(theirs)
        measures["accelerate"] = _first_batch(lambda: skip(theirs(), skipped))
    resumed = sum(1 for _ in resume())
    if resumed != -(-RESUME_LENGTH // BATCH) - skipped:
        raise RuntimeError(f"the resumed epoch has {resumed} batches")
    return interleave(measures, rounds=rounds)


def _first_batch(prepare: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that measures the time from starting the iteration to the first batch."""

    def measure() -> float:
        loader = prepare()
        start = time.perf_counter()
        batches: Iterator[Any] = iter(loader)
        next(batches)
        seconds = time.perf_counter() - start
        del batches
        gc.collect()  # free what is left of the epoch outside of the time of others
        return seconds

    return measure


def memory_rows(*, quick: bool = False) -> list[Row]:
    """Measure the peak memory up to the first batch, in processes that do nothing else."""
    length = MEMORY_LENGTH // (10 if quick else 1)
    names = ["plain", "accel_data"]
    if importlib.util.find_spec("accelerate"):
        names.append("accelerate.data_loader")
    peaks = {name: _peak(name, length, 1) for name in names}
    shared = _peak("accel_data", length, 8)
    what = f"peak memory of {length // 10**6} million samples, shuffled: bytes per sample"
    base = f"{peaks['plain'] * length / 1e9:.2f} GB with the plain DataLoader"
    theirs = {name: peaks[f"{name}.data_loader"] for name in ("accelerate",) if len(names) > 2}
    return [
        Row(what, peaks["accel_data"], MEMORY_LIMIT_BYTES, unit="B", peers=theirs, base=base),
        Row(f"{what}, 1 rank of 8", shared, MEMORY_LIMIT_SHARED_BYTES, unit="B"),
    ]


def _peak(package: str, length: int, world: int) -> float:
    peak: int = run_workers("loaders:measure_peak", 1, package=package, length=length, world=world)
    return peak / length


def measure_peak(rank: int, size: int, package: str, length: int, world: int) -> int:
    """Return the growth in bytes of this process's peak memory up to the first batch."""
    torch.set_num_threads(1)
    _first(package, 1000, world)  # what is imported and made once is no cost of the samples
    before = _high_water_mark()
    _first(package, length, world)
    return _high_water_mark() - before


def _first(package: str, length: int, world: int) -> None:
    make = partial(DataLoader, range(length), BATCH, shuffle=True)  # type: ignore[arg-type]
    next(iter(make() if package == "plain" else _prepared(package, make, world)))


def _high_water_mark() -> int:
    # Not from getrusage, which starts at the peak of the parent process.
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def _prepared(package: str, make: Callable[[], Any], world: int = 1) -> Any:
    prepare = importlib.import_module(package).prepare_data_loader
    return prepare(make(), num_processes=world, process_index=world // 2)


def _peers(compared: dict[str, Spread]) -> dict[str, float]:
    return {name: compared[name].median for name in ("accelerate", "lightning-fabric") if name in compared}
