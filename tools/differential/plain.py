"""A program on plain PyTorch, in one process: what every engine has to give."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from .follow import MAX_NORM, MAX_VALUE
from .model import (
    GLOBAL_BATCH,
    LENGTH,
    Samples,
    evaluation_samples,
    make_net,
    make_optimizers,
    make_schedules,
    mean_loss,
    sum_loss,
)
from .program import Program

__all__ = ["PlainSession"]


class PlainSession:
    """A training without accel.

    Args:
        program: The program.
        dtype: Of weights.
        orders: The samples of each epoch, in their order.
    """

    def __init__(self, program: Program, dtype: torch.dtype, orders: list[list[int]]) -> None:
        self.program = program
        self.orders = orders
        self.samples = Samples(program.length * GLOBAL_BATCH, program.seed)
        self.net = make_net(program, dtype)
        self.saved: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        self._optimizers = make_optimizers(self.program, self.net)
        self._schedules = make_schedules(self.program, self._optimizers)
        self.epoch, self.done, self.step = 0, 0, 0
        self.weight, self.counted = 0, False
        self.boundary = True
        self.net.zero_grad()

    @property
    def optimizers(self) -> list[Any]:
        """Those that step now: none inside a window."""
        return self._optimizers if self.boundary else []

    @property
    def schedules(self) -> list[Any]:
        """Those that move now."""
        return self._schedules if self.boundary else []

    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for item in self._optimizers for group in item.param_groups]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rest of this epoch, or the next one."""
        if self.done == self.program.length:
            self.epoch, self.done = self.epoch + 1, 0
        while self.done < self.program.length:
            chosen = self.orders[self.epoch][self.done * GLOBAL_BATCH :][:GLOBAL_BATCH]
            self.done += 1
            yield self.samples.tokens[chosen], torch.tensor(chosen)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The context of one micro-batch."""
        self.step += 1
        self.counted = False
        self.boundary = self.step == self.program.accumulation or self.done == self.program.length
        yield
        if self.boundary:
            self.step, self.weight = 0, 0

    def is_boundary(self) -> bool:
        """Whether this micro-batch ends its window."""
        return self.boundary

    def finish(self) -> None:
        """Divide what the window gathered by its weight."""
        if self.boundary and self.program.weighted:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self.weight

    @contextlib.contextmanager
    def losses(
        self, tokens: torch.Tensor, ids: torch.Tensor, flipped: bool
    ) -> Iterator[tuple[torch.Tensor, int | None]]:
        """The loss of a batch, and its weight."""
        tokens = tokens.flip(1) if flipped else tokens
        logits = self.net(tokens[:, :-1])
        if self.program.weighted:
            ids = ids[:, None].expand(-1, LENGTH)
            yield sum_loss(logits, tokens[:, 1:], ids, torch.arange(LENGTH).expand_as(ids))
        else:
            yield mean_loss(logits, tokens[:, 1:]), None

    def backward(self, loss: torch.Tensor, weight: int | None, keeps_graph: bool = False) -> None:
        """Its backward pass; a weight counts once for a micro-batch."""
        if weight is None:
            torch.autograd.backward(loss / self.program.accumulation, retain_graph=keeps_graph)
            return
        if not self.counted:
            self.weight, self.counted = self.weight + weight, True
        torch.autograd.backward(loss, retain_graph=keeps_graph)

    def shown(self, loss: torch.Tensor, weight: int | None) -> float:
        """The loss."""
        return float(loss.detach())

    def ids(self, ids: torch.Tensor) -> list[int]:
        """The samples."""
        return sorted(ids.tolist())

    def clip(self, how: str) -> float | None:
        """Clip; returns the norm, if there is one."""
        if how == "value":
            with_gradients = [item for item in self.net.parameters() if item.grad is not None]
            if with_gradients:  # torch 2.13 fails on none
                torch.nn.utils.clip_grad_value_(with_gradients, MAX_VALUE)
            return None
        chosen: torch.nn.Module = self.net if how == "norm" else self.net.blocks[0]
        return float(torch.nn.utils.clip_grad_norm_(chosen.parameters(), MAX_NORM))

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return self.saved is not None

    def act(self, action: str) -> Any:
        """Do what comes before a micro-batch; returns what it shows, if anything."""
        if action == "evaluate":
            tokens = evaluation_samples(self.program)
            with torch.no_grad():
                self.net.eval()
                logits = self.net(tokens[:, :-1])
                self.net.train()
            return float(mean_loss(logits, tokens[:, 1:]))
        if action == "forward":
            self.net(evaluation_samples(self.program)[:, :-1])
        elif action == "save":
            self._save()
        elif action == "load":
            self._load()
        elif action == "add group":
            for optimizer in self._optimizers[:1]:
                optimizer.add_param_group({"params": list(self.net.blocks[-1].parameters())})
        elif action in ("freeze", "unfreeze"):
            self.net.blocks[0].requires_grad_(action == "unfreeze")
        elif action == "state":
            return self.state()
        elif action == "prepare again":
            self._start()
        return None

    def state(self) -> dict[str, torch.Tensor]:
        """The full weights."""
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def _save(self) -> None:
        self.saved = {
            "net": self.state(),
            # As in a new process, where there are none but those of an open window.
            "gradients": [
                None if item.grad is None or self.boundary else item.grad.clone()
                for item in self.net.parameters()
            ],
            "others": copy.deepcopy([item.state_dict() for item in (*self._optimizers, *self._schedules)]),
            "place": (self.epoch, self.done, self.step, self.weight),
        }

    def _load(self) -> None:
        assert self.saved is not None
        saved = copy.deepcopy(self.saved)
        self.net.load_state_dict(saved["net"])
        for parameter, gradient in zip(self.net.parameters(), saved["gradients"], strict=True):
            parameter.grad = gradient
        for item, state in zip((*self._optimizers, *self._schedules), saved["others"], strict=True):
            item.load_state_dict(state)
        self.epoch, self.done, self.step, self.weight = saved["place"]
