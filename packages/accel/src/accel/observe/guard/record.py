"""Records of an accumulation window to recompute its losses from: batches, generators, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.observe.attach import Undo, follow, put
from accel.observe.guard.batch import encode
from accel_ckpt.training_state.rng import get_rng_state
from accel_data.loader.base import DataLoaderAdapter
from accel_data.loader.indices import IndexRecorder
from accel_ops.trees.walk import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.training.run import Run


@dataclass(frozen=True)
class _Handed:
    """A batch, and the generators when the loop got it."""

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
    """Backward passes since a batch was handed out.

    Attributes:
        handed: What each loader has handed out, by its number.
        buffers: Those of each model, by its number, before its first forward pass.
        losses: Per backward pass the loss, what it was multiplied by for its weight, and whether the weights
            of the window's step computed it.
    """

    handed: dict[int, _Handed]
    buffers: dict[int, dict[str, torch.Tensor]]
    losses: list[tuple[torch.Tensor, Any, bool]] = field(default_factory=list)

    def to_state(self) -> dict[str, Any]:
        """Plain values."""
        losses = [
            {"loss": loss.cpu().clone(), "factor": _plain(factor), "compared": compared}
            for loss, factor, compared in self.losses
        ]
        handed = {number: item.to_state() for number, item in self.handed.items()}
        return {"handed": handed, "buffers": self.buffers, "losses": losses}


class WindowRecorder:
    """Keeps an accumulation window of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window: list[_MicroBatch] = []
        self._handed: dict[int, _Handed] = {}  # since the last backward pass
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}  # since the last batch
        # Of each buffer a copy, and which change of it torch has counted.
        self._copies: Any = WeakIdKeyDictionary()
        self._factor: Any = None
        self._undo: list[Undo] = [put(run.window, "weigh", partial(self._weigh, run.window.weigh))]

    def model_prepared(self, model: torch.nn.Module) -> None:
        """Keep its buffers, as they are before the window's first forward pass."""
        number = next(index for index, item in enumerate(self._run.models) if item is model)
        hook = partial(self._before_forward, number)
        self._undo.append(called(self._run, model).register_forward_pre_hook(hook).remove)

    def loader_prepared(self, loader: Any) -> None:
        """Keep what it hands out."""
        number = len(self._run.loaders) - 1
        self._undo.append(follow(loader, partial(self._hand_on, number)))

    def note_loss(self, loss: torch.Tensor, begins: bool) -> None:
        """Note a backward pass.

        Args:
            loss: Its loss.
            begins: Whether an optimizer has stepped since the last one.
        """
        if begins:
            # Without a batch since, it is another pass over the last one (two models that step in turn).
            last = self._window[-1:] if not self._handed else []
            self._window = [
                replace(item, losses=[(value, factor, False) for value, factor, _ in item.losses])
                for item in last
            ]
        if self._handed or not self._window:
            self._window.append(_MicroBatch(self._handed, self._buffers))
            self._handed = {}
        self._window[-1].losses.append((loss.detach(), self._factor, True))
        self._factor = None

    def to_state(self) -> dict[str, Any]:
        """The window in plain values."""
        return {
            "micro_batches": [item.to_state() for item in self._window],
            "num_threads": torch.get_num_threads(),
        }

    def stop(self) -> None:
        """Take off what was attached."""
        while self._undo:
            self._undo.pop()()

    def _hand_on(self, number: int, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        notes = IndexRecorder(loader) if isinstance(loader, DataLoaderAdapter) else None
        for count, batch in enumerate(batches if notes is None else notes.begin(batches)):
            indices = None if notes is None else notes.next()
            self._buffers = {}
            # Containers of its own, as loops take entries out of batches.
            tensors, put_together = flatten(batch)
            kept = put_together(tensors)
            rng = get_rng_state(self._run.process)
            epoch = getattr(loader, "iteration", None)
            self._handed[number] = _Handed(kept, rng, epoch, count, indices)
            yield batch

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

    def _weigh(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._factor = plain(*args, **kwargs)
        return self._factor


def called(run: Run, model: torch.nn.Module) -> torch.nn.Module:
    """The part of a prepared model whose buffers are final when it is called."""
    # Inside of DDP, which broadcasts buffers before it calls the model; outside of compiled code.
    return model if hasattr(model, "_orig_mod") else run.engine.unwrap_model(model)


def model_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model by name, also those that its state leaves out."""
    return dict(getattr(model, "_orig_mod", model).named_buffers())


def _plain(factor: Any) -> Any:
    return factor.cpu() if isinstance(factor, torch.Tensor) else factor
