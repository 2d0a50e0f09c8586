"""Records of an accumulation window to recompute its losses from: batches, generators, buffers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.engines.common.loader import unwrap_loader
from accel.observe.guard.batch import encode
from accel_ckpt.training_state.rng import get_rng_state
from accel_data.loader.base import DataLoaderAdapter
from accel_data.loader.indices import IndexRecorder
from accel_ops.trees.walk import flatten
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.training.run import Run


@dataclass(frozen=True)
class _RecordedBatch:
    """A batch, and the states of the random generators when the loop got it."""

    batch: Any
    rng: dict[str, Any]
    epoch: int | None
    number: int
    indices: list[int] | None

    def to_state(self) -> dict[str, Any]:
        """Plain values."""
        place = {"epoch": self.epoch, "number": self.number, "indices": self.indices}
        return {"batch": encode(self.batch), "rng": self.rng, **place}


@dataclass
class _MicroBatch:
    """The backward passes after a batch was yielded.

    Attributes:
        batches: The batch of each loader, by its number.
        buffers: Those of each model, by its number, before its first forward pass.
        losses: Per backward pass the loss, the factor that it was multiplied with for its weight, and whether
            the weights of the window's step computed it.
    """

    batches: dict[int, _RecordedBatch]
    buffers: dict[int, dict[str, torch.Tensor]]
    losses: list[tuple[torch.Tensor, Any, bool]] = field(default_factory=list)

    def to_state(self) -> dict[str, Any]:
        """Plain values."""
        losses = [
            {"loss": loss.cpu().clone(), "factor": _plain(factor), "compared": compared}
            for loss, factor, compared in self.losses
        ]
        batches = {number: item.to_state() for number, item in self.batches.items()}
        return {"handed": batches, "buffers": self.buffers, "losses": losses}


class WindowRecorder(Observer):
    """Keeps an accumulation window of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window: list[_MicroBatch] = []
        self._batches: dict[int, _RecordedBatch] = {}  # since the last backward pass
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}  # since the last batch
        # Of each buffer a copy, and which change of it torch has counted.
        self._copies: Any = WeakIdKeyDictionary()
        self._factor: Any = None
        self._loaders: WeakKeyDictionary[Any, _Iteration] = WeakKeyDictionary()
        self._hooks: list[Any] = []

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Keep its buffers, as they are before the window's first forward pass."""
        number = next(index for index, item in enumerate(self._run.prepared.models) if item is model)
        hook = partial(self._before_forward, number)
        self._hooks.append(called_module(self._run, model).register_forward_pre_hook(hook))

    def loader_started(self, loader: Any) -> None:
        """Count its batches from here, and record their indices."""
        number = loader_number(self._run, loader)
        if number is None:
            return
        indices = IndexRecorder(loader) if isinstance(loader, DataLoaderAdapter) else None
        if indices is not None:
            indices.start()
        self._loaders[loader] = _Iteration(number, indices)

    def loader_ended(self, loader: Any) -> None:
        """Leave the loader as it was, also if no batch was read."""
        iteration = self._loaders.pop(loader, None)
        if iteration is not None and iteration.indices is not None:
            iteration.indices.end()

    def after_batch(self, loader: Any, batch: Any) -> None:
        """Keep a batch."""
        iteration = self._loaders.get(loader)
        if iteration is None:
            return
        indices = None if iteration.indices is None else iteration.indices.next()
        self._buffers = {}
        # In new containers, as loops take entries out of batches.
        tensors, unflatten = flatten(batch)
        kept = unflatten(tensors)
        rng = get_rng_state(self._run.process)
        epoch = getattr(loader, "iteration", None)
        self._batches[iteration.number] = _RecordedBatch(kept, rng, epoch, iteration.count, indices)
        iteration.count += 1

    def loss_weighted(self, weight: Any, factor: Any) -> None:
        """Keep the factor of the loss to come."""
        self._factor = factor

    def record_loss(self, loss: torch.Tensor, begins: bool) -> None:
        """Record a backward pass.

        Args:
            loss: Its loss.
            begins: Whether an optimizer has stepped since the last one.
        """
        if begins:
            # Without a batch since, it is another pass over the last one (two models that step in turn).
            last = self._window[-1:] if not self._batches else []
            self._window = [
                replace(item, losses=[(value, factor, False) for value, factor, _ in item.losses])
                for item in last
            ]
        if self._batches or not self._window:
            self._window.append(_MicroBatch(self._batches, self._buffers))
            self._batches = {}
        self._window[-1].losses.append((loss.detach(), self._factor, True))
        self._factor = None

    def to_state(self) -> dict[str, Any]:
        """The window in plain values."""
        return {
            "micro_batches": [item.to_state() for item in self._window],
            "num_threads": torch.get_num_threads(),
        }

    def stop(self) -> None:
        """Remove hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_forward(self, number: int, model: torch.nn.Module, _: Any) -> None:
        if number in self._buffers or not torch.is_grad_enabled():
            return
        copies: dict[str, torch.Tensor] = {}
        for name, buffer in model_buffers(model).items():
            version, copy = self._copies.get(buffer, (None, None))
            if version != buffer._version:
                copy = buffer.detach().clone()
                self._copies[buffer] = buffer._version, copy
            copies[name] = copy
        self._buffers[number] = copies


@dataclass
class _Iteration:
    """An iteration over a loader."""

    number: int  # of the loader
    indices: IndexRecorder | None
    count: int = 0  # of its batches


def loader_number(run: Run, loader: Any) -> int | None:
    """The number of a prepared loader, or of the one that it is a copy of without the first batches."""
    loaders = [unwrap_loader(item) for item in run.prepared.loaders]
    numbers = [number for number, item in enumerate(loaders) if item is loader]
    numbers += [number for number, item in enumerate(loaders) if item.dataset is loader.dataset]
    return numbers[0] if numbers else None


def called_module(run: Run, model: torch.nn.Module) -> torch.nn.Module:
    """The module inside a prepared model whose buffers are final when it is called."""
    # Inside of DDP, which broadcasts buffers before it calls the model; outside of compiled code.
    return model if hasattr(model, "_orig_mod") else run.engine.unwrap_model(model)


def model_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model by name, also those that its state leaves out."""
    return dict(getattr(model, "_orig_mod", model).named_buffers())


def _plain(factor: Any) -> Any:
    return factor.cpu() if isinstance(factor, torch.Tensor) else factor
