"""A training loop with accumulation: a prepared loader, windows of four, an optimizer and a schedule.

The model is that of the step row, and the plain loop does by hand what the others do by their interface: it
scales the loss, and steps, moves the schedule and clears gradients in each fourth micro-batch.
"""

from __future__ import annotations

import importlib
import importlib.util
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from . import datasets
from .devices import waiting
from .row import Row
from .step import BATCH, CLASSES, WIDTH, Contestant, check_same_work, faster_than_peers, make_parts
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["accumulate_rows", "measure_accumulation"]

LIMIT = 1.04
WINDOW, MICRO_BATCHES = 4, 32


def accumulate_rows(*, quick: bool = False, device: str = "cpu") -> list[Row]:
    """Measure one epoch of the loop on one process, as a multiple of the plain PyTorch loop."""
    return [_row(kind, quick, device) for kind in datasets.KINDS]


def _row(kind: str, quick: bool, device: str) -> Row:
    samples: Samples = run_workers(
        "accumulate:measure_accumulation", 1, kind=kind, rounds=10 if quick else 150, device=device
    )
    compared = ratios(samples)
    peers = {name: compared[name].median for name in ("accelerate", "lightning-fabric") if name in compared}
    loop = f"training loop with windows of {WINDOW}{datasets.suffix(kind)}"
    return Row(
        what=f"{loop}, 1 process: time / plain PyTorch",
        value=compared["accel"].median,
        limit=LIMIT,
        condition=faster_than_peers(compared) if peers else None,
        peers=peers,
        noise=compared[CONTROL],
        base=f"{1e6 * median(samples[BASELINE]) / MICRO_BATCHES:.0f} us per micro-batch",
    )


def measure_accumulation(rank: int, size: int, kind: str, rounds: int, device: str) -> Samples:
    """Time one epoch of each contestant; runs in a worker."""
    torch.set_num_threads(1)
    contestants: dict[str, Contestant] = {
        BASELINE: _plain(kind, device),
        CONTROL: _plain(kind, device),
        "accel": _accel(kind, device),
    }
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _accelerate(kind, device)
    if importlib.util.find_spec("lightning_fabric"):
        contestants["lightning-fabric"] = _fabric(kind, device)
    measures = {name: timed(contestant.step, 1, waiting(device)) for name, contestant in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=3)
    check_same_work(contestants)
    return samples


def _parts(
    kind: str,
    device: str,
) -> tuple[nn.Module, torch.optim.Optimizer, CosineAnnealingLR, Any]:
    model, optimizer, _, _ = make_parts(device)
    count = MICRO_BATCHES * BATCH
    data = datasets.make(kind, torch.randn(count, WIDTH), torch.randint(CLASSES, (count,)))
    schedule = CosineAnnealingLR(optimizer, T_max=1_000_000)
    return model, optimizer, schedule, DataLoader(data, BATCH, pin_memory=device == "cuda")


def _plain(kind: str, device: str) -> Contestant:
    model, optimizer, schedule, loader = _parts(kind, device)

    moves = device != "cpu"

    def epoch() -> None:
        for index, (inputs, labels) in enumerate(loader, start=1):
            if moves:
                inputs, labels = (item.to(device, non_blocking=True) for item in (inputs, labels))
            loss = F.cross_entropy(model(inputs), labels) / WINDOW
            loss.backward()  # type: ignore[no-untyped-call]
            if index % WINDOW == 0 or index == len(loader):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return Contestant(epoch, list(model.parameters()))


def _accel(kind: str, device: str) -> Contestant:
    from accel import Accelerator

    accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=WINDOW)
    return _accelerator_epoch(accelerator, kind, device)


def _accelerate(kind: str, device: str) -> Contestant:
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=device == "cpu", gradient_accumulation_steps=WINDOW)
    return _accelerator_epoch(accelerator, kind, device)


def _accelerator_epoch(accelerator: Any, kind: str, device: str) -> Contestant:
    """Make the loop of either library: they share one interface, and no type."""
    model, optimizer, schedule, loader = _parts(kind, device)
    parameters = list(model.parameters())
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    def epoch() -> None:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return Contestant(epoch, parameters)


def _fabric(kind: str, device: str) -> Contestant:
    lightning_fabric = importlib.import_module("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator=device, devices=1)
    fabric.launch()
    model, optimizer, schedule, loader = _parts(kind, device)
    parameters = list(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def epoch() -> None:
        for index, (inputs, labels) in enumerate(loader, start=1):
            closes = index % WINDOW == 0 or index == len(loader)
            with fabric.no_backward_sync(model, enabled=not closes):
                fabric.backward(F.cross_entropy(model(inputs), labels) / WINDOW)
            if closes:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return Contestant(epoch, parameters)
