"""Big models: loading to a place, placing, what a hook costs per call, and reading ahead from the disk.

accelerate does the same work from the same files, and is called as a user calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .row import Row
from .timing import BASELINE, CONTROL, Samples, differences, interleave, ratios, spread, timed
from .workers import run_workers

__all__ = [
    "hook_rows",
    "load_peak_row",
    "measure_hooks",
    "measure_load",
    "measure_load_peak",
    "measure_planning",
    "measure_prefetch",
    "placed_load_rows",
    "planning_rows",
    "prefetch_row",
]

LOAD_FASTER_LIMIT = 2.0
LOAD_AND_RUN_LIMIT = 1.0
LOAD_PEAK_LIMIT = 0.1  # of the model, in addition to the part that stays in memory
HOOK_LIMIT = 0.5
PLANNING_FASTER_LIMIT = 10.0
PLANNING_CPU_LIMIT_S = 3.0
PREFETCH_LIMIT = 1.5

MODULES, QUICK_MODULES, WIDTH = 400, 40, 512  # 1 MiB of weights per module
TINY_MODULES, TINY = 100, 4
PLANNED_TENSORS, QUICK_TENSORS = 100_000, 4_000
AHEAD_MODULES, AHEAD_WIDTH = 24, 2048  # 16 MiB of weights per module


def placed_load_rows(*, quick: bool = False) -> list[Row]:
    """Measure load_checkpoint_and_dispatch against accelerate's; nothing where that is not installed."""
    if not importlib.util.find_spec("accelerate"):
        return []
    modules, rounds = (QUICK_MODULES, 2) if quick else (MODULES, 5)
    rows = []
    for half_on_disk in (False, True):
        samples: Samples = run_workers(
            "big_models:measure_load", 1, modules=modules, half_on_disk=half_on_disk, rounds=rounds
        )
        where = "half to the disk" if half_on_disk else "to the CPU"
        what = f"load_checkpoint_and_dispatch of {modules} MiB in {modules} modules {where}"
        compared = ratios(samples, over="accel")
        base = f"{1e3 * median(samples['accel']):.0f} ms"
        rows.append(
            Row(
                f"{what}: time of accelerate / accel",
                compared["accelerate"].median,
                LOAD_FASTER_LIMIT,
                at_least=True,
                base=base,
            )
        )
        both = [
            (theirs + after) / (ours + own)
            for theirs, after, ours, own in zip(
                samples["accelerate"],
                samples["accelerate, forward"],
                samples["accel"],
                samples["accel, forward"],
                strict=True,
            )
        ]
        rows.append(
            Row(
                f"{what}, and the first forward: time of accelerate / accel",
                spread(both).median,
                LOAD_AND_RUN_LIMIT,
                at_least=True,
            )
        )
    return rows


def load_peak_row(*, quick: bool = False) -> Row:
    """Measure the peak of memory while a model is loaded and runs once, half of it from the disk."""
    modules = QUICK_MODULES if quick else MODULES
    peak: dict[str, float] = run_workers("big_models:measure_load_peak", 1, modules=modules)
    return Row(
        what=f"load_checkpoint_and_dispatch of {modules} MiB, half to the disk, and a forward: peak memory "
        "over that before and the resident half / model",
        value=(peak["peak"] - peak["resident"]) / peak["model"],
        limit=LOAD_PEAK_LIMIT,
        base=f"{peak['resident'] / 2**20:.0f} MiB resident",
    )


def planning_rows(*, quick: bool = False) -> list[Row]:
    """Measure the CPU time of infer_auto_device_map, and of accelerate's on the same model."""
    tensors = QUICK_TENSORS if quick else PLANNED_TENSORS
    cpu_s: dict[str, float] = run_workers("big_models:measure_planning", 1, tensors=tensors)
    what = f"infer_auto_device_map of {tensors} tensors"
    rows = [
        Row(
            f"{what}: CPU seconds",
            cpu_s["accel"],
            PLANNING_CPU_LIMIT_S,
            unit="s",
            peers={"accelerate": cpu_s["accelerate"]} if "accelerate" in cpu_s else {},
        )
    ]
    if "accelerate" in cpu_s:
        faster = cpu_s["accelerate"] / cpu_s["accel"]
        what = f"{what}: CPU time of accelerate / accel"
        rows.append(Row(what, faster, PLANNING_FASTER_LIMIT, at_least=True))
    return rows


def hook_rows(*, quick: bool = False) -> list[Row]:
    """Measure what hooks add to each call of a module; nothing where accelerate is not installed."""
    if not importlib.util.find_spec("accelerate"):
        return []
    kinds = {
        "in place": "AlignDevicesHook with nothing to move",
        "cpu": "weights offloaded to the CPU",
        "disk": "weights offloaded to the disk",
    }
    rows = []
    for kind, name in kinds.items():
        samples: Samples = run_workers(
            "big_models:measure_hooks", 1, kind=kind, rounds=5 if quick else 20 if kind == "disk" else 60
        )
        added = differences(samples)
        shares = [
            (ours - plain) / (theirs - plain)
            for ours, theirs, plain in zip(
                samples["accel"], samples["accelerate"], samples[BASELINE], strict=True
            )
        ]
        rows.append(
            Row(
                what=f"call of a module of {TINY} x {TINY}, {name}: time added / by accelerate",
                value=spread(shares).median,
                limit=HOOK_LIMIT,
                noise=ratios(samples)[CONTROL],
                base=f"{1e6 * added['accel'].median / TINY_MODULES:.1f} us added, "
                f"{1e6 * added['accelerate'].median / TINY_MODULES:.1f} us by accelerate",
            )
        )
    return rows


def prefetch_row(*, quick: bool = False) -> Row:
    """Measure a forward from the disk with and without reading ahead, with nothing of it in the cache."""
    found: dict[str, Any] = run_workers(
        "big_models:measure_prefetch",
        1,
        modules=4 if quick else AHEAD_MODULES,
        width=512 if quick else AHEAD_WIDTH,
        rounds=2 if quick else 5,
    )
    samples: Samples = found["samples"]
    compared = ratios(samples, over="accel")
    megabytes = found["bytes"] >> 20
    return Row(
        what=f"forward of {megabytes} MiB from the disk, not in the cache: time without / with reading ahead",
        value=compared[BASELINE].median,
        limit=PREFETCH_LIMIT,
        at_least=True,
        noise=ratios(samples)[CONTROL],
        base=f"{median(samples[BASELINE]):.2f} s, of which computing {found['compute']:.2f} s",
    )


def measure_load(rank: int, size: int, modules: int, half_on_disk: bool, rounds: int) -> Samples:
    """Time loading, and the first forward after it, of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    places = {str(number): "disk" if half_on_disk and number % 2 else "cpu" for number in range(modules)}
    forwards: Samples = {}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        file = _write_checkpoint(Path(folder), modules)

        def load(library: str) -> float:
            big = importlib.import_module(library)
            with torch.device("meta"):
                model = _layers(modules, WIDTH)
            with tempfile.TemporaryDirectory(dir=folder) as offload:
                start = time.perf_counter()
                big.load_checkpoint_and_dispatch(model, file, device_map=places, offload_folder=offload)
                loaded = time.perf_counter()
                with torch.no_grad():
                    model(torch.ones(1, WIDTH))
                forwards.setdefault(library, []).append(time.perf_counter() - loaded)
            return loaded - start

        samples = interleave({name: partial(load, name) for name in ("accel", "accelerate")}, rounds=rounds)
    return samples | {f"{name}, forward": values[-rounds:] for name, values in forwards.items()}


def measure_load_peak(rank: int, size: int, modules: int) -> dict[str, float]:
    """Return how far memory goes above that before, and what stays in it, in bytes; runs in a worker."""
    from accel import load_checkpoint_and_dispatch

    torch.set_num_threads(1)
    places = {str(number): "disk" if number % 2 else "cpu" for number in range(modules)}
    with tempfile.TemporaryDirectory() as folder:
        file = _write_checkpoint(Path(folder), modules)
        with torch.device("meta"):
            model = _layers(modules, WIDTH)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted again
        load_checkpoint_and_dispatch(model, file, device_map=places)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
        resident = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        return {"peak": _resident("VmHWM") - before, "resident": float(resident), "model": float(whole)}


def measure_planning(rank: int, size: int, tensors: int) -> dict[str, float]:
    """Return the CPU seconds of a plan over three accelerators and the CPU; runs in a worker."""
    blocks, per_block = tensors // 10, 5
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(4, 4) for _ in range(per_block))) for _ in range(blocks))
        )
    total = sum(parameter.nbytes for parameter in model.parameters())
    memory = {0: total // 4, 1: total // 4, 2: total // 4, "cpu": total}
    found: dict[str, float] = {}
    maps: list[Mapping[str, Any]] = []
    with _quiet():
        for name in ("accel", "accelerate"):
            if importlib.util.find_spec(name):
                big = importlib.import_module(name)
                start = time.process_time()
                maps.append(big.infer_auto_device_map(model, max_memory=memory))
                found[name] = time.process_time() - start
    if any({*found_map.values()} != {0, 1, 2, "cpu"} for found_map in maps):
        raise RuntimeError("a map does not use all devices")
    return found


def measure_hooks(rank: int, size: int, kind: str, rounds: int) -> Samples:
    """Time calls of small modules, plain and with the hooks of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _quiet(), torch.no_grad():
        models: dict[str, nn.Module] = {
            BASELINE: _layers(TINY_MODULES, TINY),
            CONTROL: _layers(TINY_MODULES, TINY),
        }
        for library in ("accel", "accelerate"):
            models[library] = _hooked(library, kind, Path(folder) / library)
        inputs = torch.ones(1, TINY)
        measures = {
            name: timed(partial(model, inputs), 2 if kind == "disk" else 10) for name, model in models.items()
        }
        return interleave(measures, rounds=rounds, warmup=2)


def measure_prefetch(rank: int, size: int, modules: int, width: int, rounds: int) -> dict[str, Any]:
    """Time forwards with and without reading ahead; runs in a worker.

    The batch is as large as it takes to compute about as long as to read: then there is most to gain.
    """
    from accel import disk_offload

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = _layers(modules, width)
        disk_offload(model, folder, execution_device="cpu")
        tiny = torch.ones(1, width)
        model(tiny)
        hooks: dict[nn.Module, Any] = {module: module._hf_hook for module in model}
        prefetchers = {module: hook.prefetcher for module, hook in hooks.items()}

        def forward(inputs: torch.Tensor, ahead: bool) -> float:
            for module, hook in hooks.items():
                hook.prefetcher = prefetchers[module] if ahead else None
            _evict(Path(folder))
            start = time.perf_counter()
            model(inputs)
            return time.perf_counter() - start

        reading = min(forward(tiny, ahead=False) for _ in range(3))
        layer, rows, computing = nn.Linear(width, width, bias=False), 64, 0.0
        while computing < reading:
            rows += rows // 8
            computing = modules * _best(partial(layer, torch.ones(rows, width)))
        inputs = torch.ones(rows, width)
        measures: dict[str, Callable[[], float]] = {
            BASELINE: partial(forward, inputs, ahead=False),
            CONTROL: partial(forward, inputs, ahead=False),
            "accel": partial(forward, inputs, ahead=True),
        }
        samples = interleave(measures, rounds=rounds, warmup=2)
        size_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.dat"))
    return {"samples": samples, "bytes": size_bytes, "compute": computing}


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def _hooked(library: str, kind: str, folder: Path) -> nn.Module:
    big, hooks = importlib.import_module(library), importlib.import_module(f"{library}.hooks")
    model, device = _layers(TINY_MODULES, TINY), torch.device("cpu")
    if kind == "cpu":
        big.cpu_offload(model, execution_device=device)
    elif kind == "disk":
        big.disk_offload(model, str(folder), execution_device=device)
    else:
        for module in model:
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=device))
    return model


def _write_checkpoint(folder: Path, modules: int) -> str:
    from safetensors.torch import save_file

    file = str(folder / "model.safetensors")
    save_file(_layers(modules, WIDTH).state_dict(), file, {"format": "pt"})
    return file


def _best(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _evict(folder: Path) -> None:
    """Drop the files from the system's cache, as if they were larger than it."""
    for path in folder.glob("*.dat"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have both libraries say nothing of devices that are not there, and draw no progress."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
