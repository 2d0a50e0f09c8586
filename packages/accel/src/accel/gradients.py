"""The gradient side of the Accelerator: windows, backward, unscaling and clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from accel import configuration
from accel.engines.ddp import sync_in_backward
from accel.prepare import holds_any, prepared_optimizer
from accel.utils.missing import not_yet

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel.engines import Engine
    from accel_optim.window import Window
    from accel_state.gradient import GradientState

__all__ = ["GradientControl"]


class GradientControl:
    """Mixin with everything that follows the accumulation window.

    A subclass has the attributes that are declared here.
    """

    window: Window
    engine: Engine
    gradient_state: GradientState
    scaler: torch.amp.GradScaler | None
    _models: list[torch.nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    @property
    def step(self) -> int:
        """Micro-batches in the open accumulation window; 0 at a boundary."""
        return self.window.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends an accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        steps = configuration.check_steps(gradient_accumulation_steps)
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last optimizer step was skipped, because fp16 gradients overflowed."""
        return any(getattr(optimizer, "step_was_skipped", False) for optimizer in self._optimizers)

    @contextlib.contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-batch of an accumulation window: gradients are synchronised in its last one alone."""
        with self.window:
            if self.window.reduce_gradients:
                yield
                return
            with contextlib.ExitStack() as stack:
                for model in models:
                    stack.enter_context(self.engine.no_sync(model))
                yield

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward leaves the gradients of `model` on their own process."""
        return self.engine.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward synchronises gradients although the forward ran under `no_sync`."""
        return sync_in_backward(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of a mean loss: divided by the accumulation steps, and scaled under fp16."""
        scale = self.window.loss_scale()
        self.engine.backward(loss if scale == 1.0 else loss * scale, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16 gradients by the loss scale, once per step; nothing to do in other precisions.

        Args:
            optimizer: One or several of the prepared optimizers; default: all.

        Raises:
            ValueError: If one is not prepared.
        """
        if self.scaler is None or not self.sync_gradients:
            return
        chosen: Sequence[Any] = self._optimizers
        if optimizer is not None:
            given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
            chosen = [prepared_optimizer(cast("Accelerator", self), item) for item in given]
        for item in chosen:
            item.unscale_gradients()

    def _unscale_gradients_of(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
        """Unscale the optimizers of these parameters alone: others may not have had their backward yet."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.scaler is not None:
            wanted = set(map(id, tensors))
            self.unscale_gradients([item for item in self._optimizers if holds_any(item, wanted)])
        return tensors

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip the gradients of `parameters` by their total norm, and return the norm before clipping.

        Inside an accumulation window the gradients are not whole yet: the norm is returned and nothing is
        clipped.
        """
        if self.sync_gradients:
            parameters = self._unscale_gradients_of(parameters)
            return self.engine.clip_grad_norm(parameters, max_norm, norm_type)
        norm = self.engine.grad_norm(parameters, norm_type)
        return norm if norm is None or self.scaler is None else norm / self.scaler.get_scale()

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]; inside an accumulation window, nothing."""
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(self._unscale_gradients_of(parameters), clip_value)

    lomo_backward = not_yet("Accelerator.lomo_backward")
