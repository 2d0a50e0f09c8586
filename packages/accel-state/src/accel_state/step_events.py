"""The events of a training step: what publishes them calls the observers that there are, and nothing else.

The events of one Accelerator hang on its `GradientState`, which its optimizers, loaders and accumulation
window share: `gradient_state.events` is None without an observer, so that a step costs one attribute test
per publisher.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from accel_state.gradient import GradientState


class Observer:
    """Observes the training of one Accelerator; a subclass overrides the methods of the events that it needs.

    An instance goes into the Accelerator's `kwargs_handlers`. Each event calls its method on every observer,
    in the order of the handlers, on the thread that trains. Events that no observer overrides cost nothing.
    """

    # When objects are prepared, and when training ends

    def model_prepared(self, model: torch.nn.Module) -> None:
        """A model was prepared; its forward passes have torch's hooks (`register_forward_pre_hook`)."""

    def optimizer_prepared(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was prepared."""

    def loader_prepared(self, loader: Any) -> None:
        """A loader was prepared."""

    def saving(self) -> AbstractContextManager[None]:
        """A context for `save_state`."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """A context for `load_state`."""
        return nullcontext()

    def stop(self) -> None:
        """Training ends (`end_training`), or an Accelerator could not be made."""

    # In a step

    def loader_started(self, loader: Any) -> None:
        """Iteration over a prepared loader begins; nothing was read yet."""

    def before_batch(self, loader: Any) -> None:
        """A prepared loader is about to read a batch."""

    def after_batch(self, loader: Any, batch: Any) -> Any:
        """A prepared loader yields a batch, which is on the device.

        Returns:
            None, or a batch that the loop gets instead.
        """

    def loader_ended(self, loader: Any) -> None:
        """Iteration over a prepared loader ended: after its last batch, by a `break` or by an error."""

    def loss_weighted(self, weight: float | torch.Tensor, factor: float | torch.Tensor) -> Any:
        """`backward(loss, weight=...)` is about to multiply its loss by a factor.

        Args:
            weight: The weight of the loss.
            factor: The number that makes its gradient a part of the mean over the window.

        Returns:
            None, or a factor to use instead.
        """

    def before_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """`accelerator.backward` (or `lomo_backward`) is about to run a backward pass.

        Args:
            loss: The loss, scaled for its window (see `gradient`) and not for fp16.
            gradient: The gradient that the pass starts from; None for 1. A mean loss of an accumulation
                window starts from 1 / steps, or is divided by the number of steps.
        """

    def after_backward(self, loss: torch.Tensor) -> None:
        """A backward pass of `accelerator.backward` (or `lomo_backward`) ended."""

    def gradients_ready(self) -> None:
        """The gradients of a window are complete: reduced, and neither unscaled, clipped nor stepped with.

        Published once per window, before the first call that unscales or clips them or steps. Those of an
        optimizer that steps in the backward pass (LOMO) are gone by then.
        """

    def gradients_clipped(self, norm: torch.Tensor | None) -> None:
        """`clip_grad_norm_` has clipped the gradients of a window.

        Args:
            norm: Their total norm before clipping, where the engine knows it.
        """

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """A prepared optimizer is about to step, and no parameter has changed (unless by LOMO, in backward).

        Where the optimizer gets a closure, this comes after its first call in the step.

        Returns:
            True to skip the step on this process: its gradients are dropped, and `step_was_skipped` is True.
            All processes have to decide the same.
        """

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A prepared optimizer has stepped, or skipped its step (`optimizer.step_was_skipped`)."""


STEP_EVENTS = (
    *("loader_started", "before_batch", "after_batch", "loader_ended", "loss_weighted", "before_backward"),
    *("after_backward", "gradients_ready", "gradients_clipped", "before_step", "after_step"),
)
_Notify = tuple[Callable[..., Any], ...]


class StepSkipped(Exception):
    """Leaves the step of an optimizer that an observer skips; no error."""


class StepEvents:
    """The observers of the steps of one Accelerator; a copy has none.

    Attributes:
        observers: The observers, in order. For each event there is also a tuple of the methods to call.
    """

    loader_started: _Notify
    before_batch: _Notify
    after_batch: _Notify
    loader_ended: _Notify
    loss_weighted: _Notify
    before_backward: _Notify
    after_backward: _Notify
    gradients_ready: _Notify
    gradients_clipped: _Notify
    before_step: _Notify
    after_step: _Notify

    def __init__(self) -> None:
        self._has_new_gradients = False
        self.set_observers(())

    def __reduce__(self) -> tuple[Any, ...]:
        return StepEvents, ()

    def set_observers(self, observers: tuple[Observer, ...]) -> None:
        """Replace the observers."""
        self.observers = observers
        for name in STEP_EVENTS:
            setattr(self, name, tuple(getattr(item, name) for item in observers if _overrides(item, name)))

    def publish_batch(self, loader: Any, batch: Any) -> Any:
        """Publish that a loader yields a batch; returns the batch that the loop gets."""
        for notify in self.after_batch:
            other = notify(loader, batch)
            batch = batch if other is None else other
        return batch

    def publish_weight(self, weight: Any, factor: Any) -> Any:
        """Publish the factor of a loss with a weight; returns the one to use."""
        for notify in self.loss_weighted:
            other = notify(weight, factor)
            factor = factor if other is None else other
        return factor

    def run_backward(self, backward: Callable[..., None], loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Run a backward pass and publish that it begins and ends."""
        for notify in self.before_backward:
            notify(loss, kwargs.get("gradient"))
        backward(loss, **kwargs)
        self._has_new_gradients = bool(self.gradients_ready)
        for notify in self.after_backward:
            notify(loss)

    def publish_gradients(self) -> None:
        """Publish that the window's gradients are ready, once after its backward passes."""
        if self._has_new_gradients:
            self._has_new_gradients = False
            for notify in self.gradients_ready:
                notify()

    def begin_step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Publish that an optimizer is about to step.

        Args:
            optimizer: The prepared optimizer.
            closure: Its closure.

        Returns:
            The closure to step with: its first call publishes the event.

        Raises:
            StepSkipped: If an observer skips the step.
        """
        if closure is not None:
            return self._publishing(optimizer, closure)
        if optimizer.gradient_sync is not None:
            optimizer.gradient_sync.reduce_accumulated()
        if self._has_new_gradients:
            self.publish_gradients()
        skips = False
        for notify in self.before_step:  # all, also after one that skips
            skips = notify(optimizer) is True or skips
        if skips:
            raise StepSkipped
        return None

    def end_step(self, optimizer: Any) -> None:
        """Publish that the step of an optimizer is over."""
        for notify in self.after_step:
            notify(optimizer)

    def _publishing(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        is_first = True

        def observed() -> Any:
            nonlocal is_first
            loss = closure()
            # Not again within the step: a line search tries weights that it does not keep.
            if is_first:
                is_first = False
                self.begin_step(optimizer)
            return loss

        return observed


def subscribe(state: GradientState, observer: Observer) -> None:
    """Publish the events of a state's steps to an observer, if it overrides any; idempotent."""
    events = state.events or StepEvents()
    if observer not in events.observers and any(_overrides(observer, name) for name in STEP_EVENTS):
        events.set_observers((*events.observers, observer))
        state.events = events


def unsubscribe(state: GradientState, observer: Observer) -> None:
    """Publish events to an observer no longer; without any other nothing is published."""
    if (events := state.events) is not None:
        events.set_observers(tuple(item for item in events.observers if item is not observer))
        if not events.observers:
            state.events = None


def _overrides(observer: Observer, name: str) -> bool:
    return getattr(type(observer), name) is not getattr(Observer, name)
