"""One DDP step of about 5 ms on two processes, for what is switched on and off around the same objects."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["STEPS", "DdpStep", "ddp_step"]

BATCH, WIDTH, CLASSES = 64, 384, 10
STEPS = 100  # in one turn of about 0.5 s: as many as statistics are gathered after by default


@dataclass(frozen=True)
class DdpStep:
    """The prepared objects of a loop.

    Two models, even two alike, differ in time by 2 % and more, as their memory lies elsewhere: what is
    compared has to run on the same one.
    """

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any

    def measure(self) -> float:
        """Return the seconds of a step, taken over several of a pass that begins here."""
        batches = iter(self.loader)
        self._run(batches, 3)  # finds the caches as what ran before left them
        start = time.perf_counter()
        self._run(batches, STEPS)
        return (time.perf_counter() - start) / STEPS

    def _run(self, batches: Any, steps: int) -> None:
        for _ in range(steps):
            inputs, labels = next(batches)
            self.accelerator.backward(F.cross_entropy(self.model(inputs), labels))
            self.optimizer.step()
            self.optimizer.zero_grad()


def ddp_step() -> DdpStep:
    """Prepare a model, its optimizer and its loader; runs in each of two workers."""
    from accel import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rows = [(torch.randn(WIDTH), 0) for _ in range(BATCH)] * 2 * (STEPS + 3)
    loader: Any = DataLoader(rows, batch_size=BATCH)  # type: ignore[arg-type]  # a list is a dataset
    return DdpStep(accelerator, *accelerator.prepare(model, optimizer, loader))
