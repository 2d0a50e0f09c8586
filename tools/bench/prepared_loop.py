"""A loop with steps of a few milliseconds, on one process or under DDP, to switch settings on and off."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["WARMUP", "PreparedLoop", "prepare_loop"]

WIDTH, CLASSES = 384, 10
BATCH = {1: 128, 2: 64}  # by the number of processes, as DDP adds to the time of a step
WARMUP = 3  # steps of a turn that are not timed


@dataclass(frozen=True)
class PreparedLoop:
    """The prepared objects of a loop.

    Two models, even two equal ones, differ in time by 2 % and more, as their memory lies elsewhere: what is
    compared has to run on the same one.
    """

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    steps: int

    def measure(self, at_end: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of a step, taken over several of a pass that begins here.

        Args:
            at_end: Called after the last of them, within the time.
        """
        batches = iter(self.loader)
        self._run(batches, WARMUP)  # finds the caches as what ran before left them
        start = time.perf_counter()
        self._run(batches, self.steps)
        at_end()
        return (time.perf_counter() - start) / self.steps

    def _run(self, batches: Any, steps: int) -> None:
        for _ in range(steps):
            inputs, labels = next(batches)
            self.accelerator.backward(F.cross_entropy(self.model(inputs), labels))
            self.optimizer.step()
            self.optimizer.zero_grad()


def prepare_loop(steps: int) -> PreparedLoop:
    """Prepare a model, its optimizer and its loader; runs in each worker.

    Args:
        steps: Steps of one turn.
    """
    from accel import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: Any = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    size = accelerator.num_processes
    rows = [(torch.randn(WIDTH), 0) for _ in range(BATCH[size])] * size * (WARMUP + steps)
    loader: Any = DataLoader(rows, batch_size=BATCH[size])  # type: ignore[arg-type]  # a list is a dataset
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return PreparedLoop(accelerator, model, optimizer, loader, steps)
