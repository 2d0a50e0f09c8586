"""Checkpoints: the costs of saving and loading compared with raw files, and how long training blocks.

All on the same disk and in the same run; every save ends on the disk (fsync), but for accelerate's, which
leaves that to the system.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import run_workers

__all__ = [
    "load_rows",
    "measure_async",
    "measure_load",
    "measure_load_peak",
    "measure_save",
    "save_async_row",
    "save_row",
]

SAVE_LIMIT = 0.8
ASYNC_LIMIT = 0.1
LOAD_LIMIT = 1.25  # from the system's cache
COLD_LOAD_LIMIT = 1.05
LOAD_FASTER_LIMIT = 2.0  # from the system's cache
COLD_LOAD_FASTER_LIMIT = 1.0  # the disk sets the pace
LOAD_PEAK_LIMIT = 1.05  # of the largest file

WIDTH, LAYERS = 1024, 100  # 4 MiB of weights per layer
QUICK_LAYERS = 8
ROUNDS, QUICK_ROUNDS = 7, 2


def save_row(*, quick: bool = False) -> Row:
    """Measure save_state, digests on, as a multiple of raw safetensors and torch.save, each with an fsync."""
    samples: Samples = run_workers("checkpoints:measure_save", 1, **_size(quick))
    compared = ratios(samples)
    return Row(
        what=f"save_state of {_megabytes(quick)} MB of weights with AdamW: time / raw files with fsync",
        value=compared["accel"].median,
        limit=SAVE_LIMIT,
        peers={"accelerate": compared["accelerate"].median} if "accelerate" in compared else {},
        noise=compared[CONTROL],
        base=f"{median(samples[BASELINE]):.2f} s",
    )


def save_async_row(*, quick: bool = False, device: str = "cpu") -> Row:
    """Measure how long save_state(blocking=False) blocks the loop, relative to a blocking save."""
    samples: Samples = run_workers("checkpoints:measure_async", 1, device=device, **_size(quick))
    compared = ratios(samples)
    return Row(
        what=f"save_state(blocking=False), {_megabytes(quick)} MB with AdamW: blocked time / blocking save",
        value=compared["accel"].median,
        limit=ASYNC_LIMIT,
        noise=compared[CONTROL],
        base=f"{median(samples[BASELINE]):.2f} s",
    )


def load_rows(*, quick: bool = False) -> list[Row]:
    """Measure load_state, digests on, compared with raw files and accelerate, and its memory."""
    what = f"load_state of {_megabytes(quick)} MB of weights with AdamW"
    rows = []
    for cold in (False, True):
        samples: Samples = run_workers("checkpoints:measure_load", 1, cold=cold, **_size(quick))
        compared = ratios(samples)
        shared: dict[str, Any] = {"noise": compared[CONTROL], "base": f"{median(samples[BASELINE]):.2f} s"}
        where = "from the disk" if cold else "from the system's cache"
        slower = f"{what}, {where}: time / safetensors and torch.load(mmap)"
        limit = COLD_LOAD_LIMIT if cold else LOAD_LIMIT
        rows.append(Row(slower, compared["accel"].median, limit, **shared))
        rows.append(Row(f"{slower}, verify=False", compared["unverified"].median, limit, **shared))
        if "accelerate" in samples:
            theirs = ratios(samples, over="accel")["accelerate"].median
            faster = f"{what}, {where}: time of accelerate / accel"
            limit = COLD_LOAD_FASTER_LIMIT if cold else LOAD_FASTER_LIMIT
            rows.append(Row(faster, theirs, limit, at_least=True, **shared))
    peak: dict[str, float] = run_workers("checkpoints:measure_load_peak", 1, layers=_size(quick)["layers"])
    rows.append(
        Row(
            f"{what}: peak memory over that before / the largest file",
            peak["peak"] / peak["largest"],
            LOAD_PEAK_LIMIT,
            base=f"{peak['largest'] / 2**20:.0f} MiB",
        )
    )
    return rows


def measure_save(rank: int, size: int, layers: int, rounds: int) -> Samples:
    """Time a save of each contestant; runs in a worker."""
    model, optimizer, _ = _objects(layers)
    ours, _ = _accelerator("accel", layers)
    contestants: dict[str, Callable[[Path], object]] = {
        BASELINE: partial(_save_raw, model, optimizer),
        CONTROL: partial(_save_raw, model, optimizer),
        "accel": lambda folder: ours.save_state(str(folder)),
    }
    if importlib.util.find_spec("accelerate"):
        theirs, _ = _accelerator("accelerate", layers)
        contestants["accelerate"] = lambda folder: theirs.save_state(str(folder))
    with tempfile.TemporaryDirectory() as base:
        measures = {name: partial(_timed_save, save, Path(base)) for name, save in contestants.items()}
        return interleave(measures, rounds=rounds)


def measure_async(rank: int, size: int, layers: int, rounds: int, device: str) -> Samples:
    """Time a blocking save, and the call of one in the background; runs in a worker."""
    accelerator, _ = _accelerator("accel", layers, device)

    def blocking(folder: Path) -> None:
        accelerator.save_state(str(folder))

    def started(folder: Path) -> None:
        accelerator.save_state(str(folder), blocking=False)

    with tempfile.TemporaryDirectory() as base:
        measure = partial(_timed_save, base=Path(base), after=accelerator.wait_for_save)
        measures = {
            BASELINE: partial(measure, blocking),
            CONTROL: partial(measure, blocking),
            "accel": partial(measure, started),
        }
        return interleave(measures, rounds=rounds)


def measure_load(rank: int, size: int, layers: int, rounds: int, cold: bool) -> Samples:
    """Time a load of each contestant into objects that are there; runs in a worker."""
    model, optimizer, _ = _objects(layers)
    with tempfile.TemporaryDirectory() as base:
        own, their = Path(base, "accel"), Path(base, "accelerate")
        ours, own_optimizer = _accelerator("accel", layers)
        saves: dict[Path, Callable[[], object]] = {own: partial(ours.save_state, str(own))}
        raw = _Load(own, optimizer, partial(_load_raw, own, model, optimizer))
        accel, unverified = (
            _Load(own, own_optimizer, partial(_load, ours, own_optimizer, str(own), verify=verify))
            for verify in (True, False)
        )
        contestants = {BASELINE: raw, CONTROL: raw, "accel": accel, "unverified": unverified}
        if importlib.util.find_spec("accelerate"):
            theirs, optimizer_of_theirs = _accelerator("accelerate", layers)
            saves[their] = partial(theirs.save_state, str(their))
            load = partial(_load, theirs, optimizer_of_theirs, str(their))
            contestants["accelerate"] = _Load(their, optimizer_of_theirs, load)
        for save in saves.values():
            save()

        def measure(contestant: _Load) -> float:
            if cold:
                # Each reads files that were just written: a disk may have its own cache, from which one
                # old file comes several times as fast as another.
                shutil.rmtree(contestant.folder)
                saves[contestant.folder]()
                _evict(contestant.folder)
            contestant.optimizer.state.clear()  # as when a run is resumed
            return _timed(contestant.call)

        measures = {name: partial(measure, contestant) for name, contestant in contestants.items()}
        return interleave(measures, rounds=rounds)


@dataclass(frozen=True)
class _Load:
    """A contestant of a load: what it reads, into which optimizer, and how."""

    folder: Path
    optimizer: torch.optim.Optimizer
    call: Callable[[], object]


def measure_load_peak(rank: int, size: int, layers: int) -> dict[str, float]:
    """Return how far load_state goes above the memory before it, and the largest file, in bytes."""
    accelerator, _ = _accelerator("accel", layers)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(accelerator.save_state(f"{base}/accel"))
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted again
        accelerator.load_state(str(folder))
        largest = max(path.stat().st_size for path in folder.iterdir())
        return {"peak": _resident("VmHWM") - before, "largest": float(largest)}


def _size(quick: bool) -> dict[str, int]:
    return {
        "layers": QUICK_LAYERS if quick else LAYERS,
        "rounds": QUICK_ROUNDS if quick else ROUNDS,
    }


def _megabytes(quick: bool) -> int:
    return _size(quick)["layers"] * WIDTH * WIDTH * 4 // 2**20


def _objects(layers: int, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, list(model.parameters())


def _accelerator(library: str, layers: int, device: str = "cpu") -> tuple[Any, torch.optim.Optimizer]:
    """Make an Accelerator of either library, with the objects prepared; return torch's optimizer too."""
    model, optimizer, _ = _objects(layers, device)
    accelerator = importlib.import_module(library).Accelerator(cpu=device == "cpu")
    accelerator.prepare(model, optimizer)
    return accelerator, optimizer


def _save_raw(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    _flush(folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    _flush(folder / "optimizer.bin")


def _load_raw(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer.load_state_dict(torch.load(folder / "optimizer.bin", mmap=True))
    _read(optimizer)


def _load(accelerator: Any, optimizer: torch.optim.Optimizer, folder: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator.load_state(folder, **options)
    _read(optimizer)


def _read(optimizer: torch.optim.Optimizer) -> None:
    """Read the full state once: mapped pages that were not read are not loaded yet."""
    state = optimizer.state_dict()["state"]
    for moments in state.values():
        for value in moments.values():
            value.sum()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _evict(folder: Path) -> None:
    """Drop the files from the system's cache, as after a restart of the machine."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_save(
    save: Callable[[Path], object], base: Path, after: Callable[[], object] = lambda: None
) -> float:
    folder = base / "saved"
    seconds = _timed(partial(save, folder))
    after()
    shutil.rmtree(folder)
    os.sync()  # the next contestant's flush waits for nothing of this one
    return seconds


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
