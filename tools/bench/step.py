"""The training step on a toy MLP: forward, backward, clip, step, zero_grad.

The model is small on purpose (a step of some hundred microseconds), so that what a library adds to each
step is seen. Every contestant has its own copy of the same model and the same batch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import run_workers

__all__ = ["measure_steps", "step_row"]

LIMIT = 1.05
BATCH, WIDTH, CLASSES = 32, 128, 10
MAX_NORM = 1.0

Step = Callable[[], None]


def step_row(size: int, *, quick: bool = False) -> Row:
    """Measure the step on `size` processes, as a multiple of plain PyTorch (DDP on several)."""
    samples: Samples = run_workers("step:measure_steps", size, rounds=40 if quick else 400)
    compared = ratios(samples)
    plain = "plain PyTorch" if size == 1 else "plain DDP"
    return Row(
        what=f"training step of a toy MLP, {size} process{'es' * (size > 1)}: time / {plain}",
        value=compared["accel"].median,
        limit=LIMIT,
        peers={
            name: compared[name].median for name in ("accelerate", "lightning-fabric") if name in compared
        },
        noise=compared[CONTROL],
        base=f"{1e6 * median(samples[BASELINE]):.0f} us",
    )


def measure_steps(rank: int, size: int, rounds: int) -> Samples:
    """Time one step of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    contestants: dict[str, Step] = {BASELINE: _plain(size), CONTROL: _plain(size), "accel": _accel()}
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _accelerate()
    if importlib.util.find_spec("lightning_fabric"):
        contestants["lightning-fabric"] = _fabric(size)
    samples = interleave(
        {name: timed(step, 5) for name, step in contestants.items()}, rounds=rounds, warmup=10
    )
    if size > 1:
        torch.distributed.destroy_process_group()
    return samples


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))


def _plain(size: int) -> Step:
    model, optimizer, inputs, labels = _parts()
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _accel() -> Step:
    from accel import Accelerator

    return _accelerator_step(Accelerator(cpu=True))


def _accelerate() -> Step:
    accelerate = importlib.import_module("accelerate")
    return _accelerator_step(accelerate.Accelerator(cpu=True))


def _accelerator_step(accelerator: Any) -> Step:
    """Make the step of either library: they share one interface, and no type."""
    model, optimizer, inputs, labels = _parts()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fabric(size: int) -> Step:
    lightning_fabric = importlib.import_module("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    model, optimizer, inputs, labels = _parts()
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        fabric.backward(F.cross_entropy(model(inputs), labels))
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step
