"""The training step on a toy MLP: forward, backward, clip, step, zero_grad.

The model is small on purpose (a step of some hundred microseconds), so that what a library adds to each
step is seen. Every contestant has its own copy of the same model and the same batch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .devices import join_group, waiting
from .row import Row
from .timing import BASELINE, CONTROL, Samples, Spread, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = [
    "BATCH",
    "CLASSES",
    "WIDTH",
    "Contestant",
    "check_same_work",
    "faster_than_peers",
    "make_parts",
    "measure_steps",
    "step_row",
]

LIMIT, LIMIT_DDP = 1.04, 1.05
BATCH, WIDTH, CLASSES = 32, 128, 10
MAX_NORM = 1.0


@dataclass(frozen=True)
class Contestant:
    """A step to time, and the parameters that it trains."""

    step: Callable[[], None]
    parameters: list[nn.Parameter]


def step_row(size: int, *, quick: bool = False, device: str = "cpu") -> Row:
    """Measure the step on `size` processes, as a multiple of plain PyTorch (DDP on several)."""
    samples: Samples = run_workers("step:measure_steps", size, rounds=40 if quick else 400, device=device)
    compared = ratios(samples)
    plain = "plain PyTorch" if size == 1 else "plain DDP"
    peers = {name: compared[name].median for name in ("accelerate", "lightning-fabric") if name in compared}
    return Row(
        what=f"training step of a toy MLP, {size} process{'es' * (size > 1)}: time / {plain}",
        value=compared["accel"].median,
        limit=LIMIT if size == 1 else LIMIT_DDP,
        condition=faster_than_peers(compared) if size == 1 and peers else None,
        peers=peers,
        noise=compared[CONTROL],
        base=f"{1e6 * median(samples[BASELINE]):.0f} us",
    )


def faster_than_peers(compared: Mapping[str, Spread]) -> tuple[str, bool]:
    """Return the condition that accel is faster than every peer of the same run."""
    own = compared["accel"].median
    peers = [name for name in compared if name not in (BASELINE, CONTROL, "accel")]
    return "faster than the peers", all(own < compared[name].median for name in peers)


def measure_steps(rank: int, size: int, rounds: int, device: str) -> Samples:
    """Time one step of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    if size > 1:
        join_group(rank, size, device)
    contestants: dict[str, Contestant] = {
        BASELINE: _plain(size, device),
        CONTROL: _plain(size, device),
        "accel": _accel(device),
    }
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _accelerate(device)
    if importlib.util.find_spec("lightning_fabric"):
        contestants["lightning-fabric"] = _fabric(size, device)
    measures = {name: timed(contestant.step, 5, waiting(device)) for name, contestant in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=10)
    check_same_work(contestants)
    if size > 1:
        end_group()
    return samples


def make_parts(
    device: str = "cpu",
) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """Make the model, its optimizer, and a batch with its labels; always the same ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))
    return model, optimizer, inputs.to(device), labels.to(device)


def check_same_work(contestants: dict[str, Contestant]) -> None:
    """After equally many steps from the same start, all must have the same weights: none has skipped work."""
    for name, contestant in contestants.items():
        pairs = zip(contestant.parameters, contestants[BASELINE].parameters, strict=True)
        if not all(torch.allclose(own, other, atol=1e-5) for own, other in pairs):
            raise RuntimeError(f"the steps of {name} end with other weights than those of {BASELINE}")


def _plain(size: int, device: str) -> Contestant:
    model, optimizer, inputs, labels = make_parts(device)
    parameters = list(model.parameters())
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, parameters)


def _accel(device: str) -> Contestant:
    from accel import Accelerator

    return _accelerator_step(Accelerator(cpu=device == "cpu"), device)


def _accelerate(device: str) -> Contestant:
    accelerate = importlib.import_module("accelerate")
    return _accelerator_step(accelerate.Accelerator(cpu=device == "cpu"), device)


def _accelerator_step(accelerator: Any, device: str) -> Contestant:
    """Make the step of either library: they share one interface, and no type."""
    model, optimizer, inputs, labels = make_parts(device)
    parameters = list(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, parameters)


def _fabric(size: int, device: str) -> Contestant:
    lightning_fabric = importlib.import_module("lightning_fabric")
    fabric = lightning_fabric.Fabric(accelerator=device, devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    model, optimizer, inputs, labels = make_parts(device)
    parameters = list(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        fabric.backward(F.cross_entropy(model(inputs), labels))
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, parameters)
