"""DeepSpeed's engine, optimizer and schedule behind the five lines of a training loop.

DeepSpeed's engine has its own `backward` and `step`, and counts micro-batches. Here the accumulation
window alone decides where a step is due: the engine is informed before each backward pass, and steps when
`optimizer.step()` is called at a boundary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accel.engines.deepspeed import gradients, weights
from accel.engines.deepspeed.weights import TrainedParameters
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler
from accel_state.logging.warning import warn
from accel_state.step_events import StepSkipped


class DeepSpeedEngineWrapper:
    """Drives the DeepSpeed engine that trains.

    Args:
        engine: The engine.
        parameters: Those that its optimizer was made from.
    """

    def __init__(self, engine: Any, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.engine = engine
        self.name = f"deepspeed zero {int(engine.zero_optimization_stage())}"
        self.is_reduced = False  # whether the gradients of a full window are ready for a step
        self.has_gathered = False  # whether there are gradients that no step has used
        self._forwards = _Forwards()
        self._factor: float | torch.Tensor | None = None
        self._sums: torch.Tensor | None = None  # of the weights after the last step
        self._trained = TrainedParameters(engine.module, parameters)
        # Counted here, as ZeRO-3 silently drops the gradients of a second backward pass.
        engine.register_forward_pre_hook(self._forwards)

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass.

        Args:
            loss: The loss, divided for its window.
            sync_gradients: Whether this is the window's last one, before a step.
            **kwargs: `retain_graph`; and `scale_wrt_gas=False`, which changes nothing: the window divides.

        Raises:
            ValueError: If `scale_wrt_gas=True`.
            RuntimeError: If DeepSpeed would lose gradients: it is the second backward pass at a window's end,
                or the second one after a single forward pass under ZeRO-3, or parameters were frozen or
                unfrozen inside of the window.
        """
        if kwargs.pop("scale_wrt_gas", False):
            raise ValueError(
                "scale_wrt_gas=True would make DeepSpeed divide the loss by its gradient_accumulation_steps "
                "as well. Leave it out: the Accelerator divides it."
            )
        self._check_loss()
        # Stage 0 reduces, and stage 3 steps, only parameters that are trained in the window's last pass.
        loses_gradients = self.engine.zero_optimization_stage() in (0, 3)
        self._trained.before_pass(not self.has_gathered, loses_gradients, self.name)
        # As under DDP, where no_sync counts if the forward pass runs in it.
        is_boundary = sync_gradients and not (self._forwards.in_no_sync or self._forwards.was_in_no_sync)
        if self._factor is not None:  # the step multiplies all, and this loss has its factor already
            loss = loss / _or_one(self._factor)
        # Set here, as DeepSpeed otherwise counts micro-batches itself: windows of the last batches of an
        # epoch are shorter.
        self.engine.set_gradient_accumulation_boundary(is_boundary)
        gradients.begin_pass(self.engine)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.is_reduced, self.has_gathered = is_boundary, True
        self._forwards.count = max(self._forwards.count - 1, 0)

    def _check_loss(self) -> None:
        stage = self.engine.zero_optimization_stage()
        if self.is_reduced and stage > 0:
            raise RuntimeError(
                f"A second backward pass at the end of an accumulation window: ZeRO-{stage} has reduced and "
                "sharded the gradients of the first one, and would lose them. Add the losses up, or run "
                "the other backward passes under accelerator.no_sync(model)."
            )
        if self._forwards.count == 0 and stage == 3:
            raise RuntimeError(
                "A second backward pass after one forward pass: ZeRO-3 would lose the gradients of the first "
                "one. Add the losses up, or run the model once for each of them."
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context for backward passes that are not the window's last."""
        before, self._forwards.in_no_sync = self._forwards.in_no_sync, True
        try:
            yield
        finally:
            self._forwards.in_no_sync = before

    def finish_window(self) -> None:
        """Reduce the gradients of a window that ended without a reduction."""
        if self.has_gathered and not self.is_reduced:
            gradients.reduce(self.engine)
            self.is_reduced = True

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients gathered so far, before the window's last backward pass."""
        if not gradients.scale_now(self.engine, factor):
            self._factor = factor

    def norm(self) -> torch.Tensor:
        """The norm of the gradients that the next step uses; 0 if there are none."""
        self.finish_window()
        if not self.is_reduced:
            return torch.zeros((), device=self.engine.device)
        with gradients.scaled(self.engine, self._factor):
            return gradients.norm(self.engine)

    def step(self) -> None:
        """Step the optimizer, and clear the gradients.

        Raises:
            RuntimeError: If parameters were frozen or unfrozen, which the optimizer does not support.
        """
        # DeepSpeed's step does nothing inside a window; the optimizer's is called only at its end.
        self.engine.set_gradient_accumulation_boundary(True)
        self.finish_window()
        if weights.steps_copies(self.engine):
            self._trained.check_step(self.name)
            weights.copy_changes(self.engine, self._sums)
        with gradients.scaled(self.engine, self._factor):
            self.engine.step()
        if weights.steps_copies(self.engine):
            self._sums = weights.sums(self.engine)
        self._forget()

    def discard(self) -> None:
        """Drop gradients that no step has used; there are none after a step."""
        gradients.discard(self.engine)
        self._forget()

    def _forget(self) -> None:
        self.is_reduced = self.has_gathered = self._forwards.was_in_no_sync = False
        self._factor = None
        # clip_grad_norm_ applies to one step; afterwards the configuration applies again.
        if hasattr(self.engine.optimizer, "clip_grad"):
            self.engine.optimizer.clip_grad = self.engine.gradient_clipping()

    def get_global_grad_norm(self) -> Any:
        """The norm of the last step's gradients, before clipping."""
        return self.engine.get_global_grad_norm()


class _Forwards:
    """A hook that counts forward passes. It has no reference to the driver, as the engine keeps it."""

    def __init__(self) -> None:
        self.count = 0
        self.in_no_sync = False  # whether `no_sync` is active
        self.was_in_no_sync = False  # whether it was in the last forward pass

    def __call__(self, *_: Any) -> None:
        self.count += 1
        self.was_in_no_sync = self.in_no_sync


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of a DeepSpeed engine: its step is the engine's, at the window's boundary.

    Args:
        optimizer: The torch optimizer that DeepSpeed steps. Its groups and options apply; its
            parameters are DeepSpeed's copies.
        driver: The driver of the engine.
        **options: Options of AcceleratedOptimizer.
    """

    def __init__(self, optimizer: Any, driver: DeepSpeedEngineWrapper, **options: Any) -> None:
        super().__init__(optimizer, device_placement=False, **options)
        self.driver = driver

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the engine step, at the window's boundary only.

        Raises:
            ValueError: If a closure is passed.
        """
        if closure is not None:
            raise ValueError(
                f"step(closure) of {type(self.optimizer).__name__}: DeepSpeed's engine steps once per "
                "backward pass. Use an optimizer that needs no closure."
            )
        if not self.gradient_state.sync_gradients:
            return
        events = self.gradient_state.events
        self._step_was_skipped = False
        try:
            if events is not None:
                events.begin_step(self)
            self.driver.step()
        except StepSkipped:
            self.skip_step()
        if events is not None:
            events.end_step(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at stage 0 in full precision.

        Raises:
            ValueError: If DeepSpeed steps copies of the weights, which it makes in prepare().
        """
        if weights.steps_copies(self.driver.engine):
            raise ValueError(
                f"add_param_group() of {type(self.optimizer).__name__} after prepare(): {self.driver.name} "
                "steps copies of the weights that it makes in prepare(), and has none of these. Give the "
                "optimizer all groups before prepare(), with lr=0 while they are frozen."
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients that no step has used; each step clears its own."""
        if not self.gradient_state.sync_gradients or not self.driver.has_gathered:
            return
        if not self.driver.is_reduced:
            warn(
                "zero_grad() before backward() in the last micro-batch of an accumulation window discards "
                "the gradients of the micro-batches before it. Call zero_grad() after step().",
            )
        self.driver.discard()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out: gradients were not finite, or `skip_step` was called."""
        return self._step_was_skipped or bool(getattr(self.driver.engine.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that DeepSpeed's engine steps, once per optimizer step.

    Args:
        scheduler: The scheduler, of the configuration or of the placeholder's callable.
        optimizers: The wrapped optimizer.
        **options: Options of AcceleratedScheduler.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped it."""


def _or_one(factor: float | torch.Tensor) -> float | torch.Tensor:
    """The factor, or 1 if it is 0: the product is 0 in any case."""
    if isinstance(factor, torch.Tensor):
        return torch.where(factor > 0, factor, 1.0)
    return factor or 1.0
