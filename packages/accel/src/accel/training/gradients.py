"""The gradient side of the Accelerator: windows, backward, unscaling and clipping."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel.training.prepare import holds_any, prepared_optimizer
from accel_optim import lomo
from accel_state.train_plan import check_accumulation_steps

if TYPE_CHECKING:
    from types import TracebackType

    from accel.engines import Engine
    from accel.training.run import Run
    from accel_optim.weight import Weight
    from accel_optim.window import Window


def drop_gradients(run: Run) -> None:
    """Drop the gradients of everything prepared, also those that an engine holds back."""
    # The torch optimizers: a wrapper's zero_grad does nothing inside a window.
    optimizers = (getattr(item, "optimizer", item) for item in run.optimizers)
    for holder in (*run.models, *optimizers):
        holder.zero_grad()
    run.engine.gradient_sync.drop_gradients()


def has_gradients(run: Run) -> bool:
    """Whether an accumulation window is open, or an engine holds gradients back in `no_sync`."""
    return bool(run.window.step) or run.engine.gradient_sync.has_unreduced_grads


class GradientControl:
    """Mixin with everything that follows the accumulation window.

    A subclass has the attributes that are declared here.
    """

    run: Run

    @property
    def step(self) -> int:
        """Micro-batches in the open accumulation window; 0 at a boundary."""
        return self.run.window.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends an accumulation window."""
        return self.run.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        # Documented as writable: loops that count micro-batches themselves set it.
        self.run.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.run.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        steps = check_accumulation_steps(gradient_accumulation_steps)
        # In place: all handles on the state share the dictionary.
        self.run.gradient_state.plugin_kwargs.update({"num_steps": steps})

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped, because fp16 gradients overflowed.

        Of two optimizers that step in turn, one may not have stepped in this micro-batch yet: ask each for
        its `step_was_skipped`.
        """
        return any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.run.optimizers)

    def accumulate(
        self, *models: torch.nn.Module, loader: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """One micro-batch of an accumulation window: gradients are synchronised in its last one alone.

        Args:
            *models: The models that the micro-batch trains.
            loader: The prepared loader whose last batch ends the window (or an object that reads one and has
                `end_of_dataloader`), where several give batches to one micro-batch. By default the loader
                that gave the batch.

        Raises:
            TypeError: If it is no prepared loader.
            ValueError: If it is not being iterated.
        """
        run = self.run
        # Nothing to hold back: the window itself is the context, as it counts micro-batches.
        if not run.engine.gradients_type.reduces_in_backward:
            return run.window if loader is None else _MicroBatch(run.window, run.engine, (), loader)
        return _MicroBatch(run.window, run.engine, models, loader)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward leaves the gradients of `model` on their own process."""
        return self.run.engine.gradients.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward synchronises gradients although the forward ran under `no_sync`."""
        from accel.engines.ddp.engine import sync_in_backward

        # Also where the engine is none of DDP: it does nothing for other models.
        return sync_in_backward(model)

    def backward(
        self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Run the backward pass of a loss, scaled for its accumulation window (and for fp16).

        Without a weight the loss is a mean, and is divided by the number of accumulation steps: the window's
        gradient is the mean over its micro-batches, if they are alike and as many as that.

        With one, the loss is a **sum** over `weight` items (tokens, say), and the window's gradient is that
        of all its losses over all its weights, on all processes: the gradient of one batch with all the
        items, however ragged the counts, however many micro-batches the window has, and however they are
        split over processes. The processes add up their weights once per window, at its end (and once more
        in the first window), so that all of them have to call it there. `weight=1` with mean losses makes a
        window that the loader's end cut short count by its real size.

        Args:
            loss: The loss, a tensor of one element.
            weight: How many items the loss is the sum over, at least 0: a number, or a tensor of one element.
                A tensor on the accelerator is used without waiting for its value. It is the weight of the
                micro-batch: several losses of one give the same weight, and each is divided by the total.
            **kwargs: Passed to the engine's backward (`retain_graph`, for one).

        Raises:
            TypeError: If the weight is no number.
            ValueError: If it is negative or not finite, if the micro-batch has another weight already, or if
                the window has losses of the other kind.
            RuntimeError: If it is given inside `join_uneven_inputs`, where processes may be out of data.
        """
        run = self.run
        if run.lomo is not None or "learning_rate" in kwargs:
            given: dict[str, Any] = {} if weight is None else {"weight": weight}
            _backward_that_steps(run, loss, **given, **kwargs)
            return
        events = run.gradient_state.events
        if weight is None:
            steps = run.window.loss_divisor()
            # The usual case without a division, which would be one more operation in every graph.
            if steps != 1:
                if _can_start_from(run, loss, kwargs):
                    # What arrives at `loss` from `loss / steps`, with no division in the graph.
                    kwargs["gradient"] = torch.full_like(loss, 1 / steps)
                else:
                    loss = loss / steps
        else:
            # bf16 and fp16 hold counts of tokens exactly up to 256 and 2048 only.
            precise = torch.promote_types(loss.dtype, torch.float32)
            factor = run.window.weigh(weight, _Gathered(run, precise))
            if events is not None:
                factor = events.publish_weight(weight, factor)
            if isinstance(factor, torch.Tensor):
                factor = factor.to(loss.device, precise, non_blocking=True)  # no wait for its value
            loss = loss * factor
        if events is None:
            run.engine.backward(loss, **kwargs)
        else:
            events.run_backward(run.engine.backward, loss, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward, and with it the step, of a prepared optimizer that steps in backward (LOMO).

        `backward` does the same by itself when such an optimizer is prepared, with the learning rate that it
        is given (`learning_rate=`) or that of the optimizer's parameter group, which schedulers move.

        Args:
            loss: The loss of the micro-batch.
            learning_rate: The learning rate of this step.

        Raises:
            ValueError: If no such optimizer is prepared, or gradients would have to be accumulated.
        """
        lomo.lomo_backward(self.run.lomo, loss, learning_rate, self.gradient_accumulation_steps)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16 gradients by the loss scale, once per step; nothing to do in other precisions.

        Args:
            optimizer: One or several of the prepared optimizers; default: all.

        Raises:
            ValueError: If one is not prepared.
        """
        _unscale_gradients(self.run, optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip the gradients of `parameters` by their total norm, and return the norm before clipping.

        Inside an accumulation window the gradients are not whole yet: the norm is returned and nothing is
        clipped. In fp16 the gradients are unscaled first, unless that was done since the last step. An
        optimizer that steps in backward (LOMO) leaves nothing to clip, with a warning.

        Raises:
            ValueError: If fp16 gradients belong to no prepared optimizer.
        """
        run = self.run
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if run.gradient_state.sync_gradients:
            if run.engine.gradient_sync.is_active:
                run.engine.gradient_sync.finish_window()
            if (events := run.gradient_state.events) is not None:
                events.publish_gradients()
            if run.scaler is not None or run.lomo is not None:
                tensors = _unscaled(run, tensors)
            gradients = run.gradients or run.engine.gradients
            norm = gradients.clip_norm(tensors, max_norm, norm_type)
            if events is not None:
                for notify in events.gradients_clipped:
                    notify(norm)
            return norm
        # The gradients so far, of this process: they are neither whole nor unscaled.
        norm = run.engine.gradients.norm(tensors, norm_type)
        if norm is None or run.scaler is None:
            return norm
        return norm / run.scaler.scale(torch.ones((), device=norm.device))  # get_scale() would wait for it

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient to [-clip_value, clip_value]; inside an accumulation window, nothing."""
        run = self.run
        if run.gradient_state.sync_gradients:
            if run.engine.gradient_sync.is_active:
                run.engine.gradient_sync.finish_window()
            if (events := run.gradient_state.events) is not None:
                events.publish_gradients()
            tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if run.scaler is not None or run.lomo is not None:
                tensors = _unscaled(run, tensors)
            run.engine.gradients.clip_value(tensors, clip_value)


def _can_start_from(run: Run, loss: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether backward may start from a gradient of this loss, with the same numbers to the last bit.

    The scale of fp16 training is multiplied in before the division, other devices than these may divide
    inexactly, and torch has its own message for losses that are no single number.
    """
    return (
        type(loss) is torch.Tensor
        and (loss.is_cpu or loss.is_cuda)
        and loss.numel() == 1
        and loss.is_floating_point()
        and run.scaler is None
        and run.engine.takes_gradient
        and "gradient" not in kwargs
    )


def _backward_that_steps(
    run: Run, loss: torch.Tensor, learning_rate: float | None = None, **kwargs: Any
) -> None:
    if kwargs:
        raise TypeError(
            "backward got " + ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) + ", and "
            "the backward of an optimizer that steps in it (LOMO) takes learning_rate alone."
        )
    if learning_rate is None:
        learning_rate = run.lomo.param_groups[0]["lr"]  # LOMO steps all groups with one rate
    lomo.lomo_backward(run.lomo, loss, learning_rate, run.gradient_state.num_steps)


def _unscale_gradients(run: Run, optimizer: Any) -> None:
    if run.scaler is None or not run.gradient_state.sync_gradients:
        return
    # First, as what an engine still holds back is multiplied by the scale too.
    run.engine.gradient_sync.finish_window()
    if (events := run.gradient_state.events) is not None:
        events.publish_gradients()
    chosen: Sequence[Any] = run.optimizers
    if optimizer is not None:
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        chosen = [prepared_optimizer(run, item) for item in given]
    for item in chosen:
        item.unscale_gradients()


def _unscaled(run: Run, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Unscale the optimizers of these parameters alone: others may not have had their backward yet."""
    tensors = run.engine.gradients.tensors_with_grad(parameters)
    if run.lomo is not None and holds_any(run.lomo, {id(tensor) for tensor in tensors}):
        lomo.warn_about_clipping(run.lomo)
    if run.scaler is not None and run.scaler.is_enabled():
        # By identity: parameters compare by value.
        wanted = {id(tensor) for tensor in tensors if tensor.grad is not None}
        holding = true_on_any_rank(run.scaler, [holds_any(item, wanted) for item in run.optimizers])
        # The processes agree, since unscaling is a collective where each has parts of the gradients.
        owners = [item for item, holds in zip(run.optimizers, holding, strict=True) if holds]
        held = {id(each) for item in owners for group in item.param_groups for each in group["params"]}
        if wanted - held:
            raise ValueError(
                f"{len(wanted - held)} of the {len(wanted)} gradients to clip are multiplied by the loss "
                "scale of fp16 training, and no prepared optimizer has their parameters, so that nobody "
                "divides them by it. Pass the optimizer to prepare() as well."
            )
        _unscale_gradients(run, owners)
    return tensors


class _MicroBatch:
    """The context of `accumulate`; a class, because a generator's context costs more than all else in it."""

    # One is made for every micro-batch.
    __slots__ = ("engine", "held_back", "loader", "models", "window")

    def __init__(
        self, window: Window, engine: Engine, models: Sequence[torch.nn.Module], loader: Any
    ) -> None:
        self.window = window
        self.engine = engine
        self.models = models
        self.loader = loader
        self.held_back: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        # The window first: it decides whether this micro-batch reduces gradients.
        self.window.__enter__(self.loader)
        if self.window.reduce_gradients:
            return
        try:
            self.held_back = self._hold_back()
        except BaseException:
            self.window.__exit__(*sys.exc_info())  # Python calls it only after an __enter__ that returned
            raise

    def _hold_back(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = self.engine.gradients.no_sync
        if len(self.models) == 1:  # the usual case, without a stack of contexts
            held_back = no_sync(self.models[0])
            held_back.__enter__()
            return held_back
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(no_sync(model))
            return stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.held_back is not None:
                self.held_back.__exit__(None, None, None)
        # After the engine's contexts, which the window's own end does not depend on.
        finally:
            self.window.__exit__(kind, error, traceback)


@dataclass(frozen=True)
class _Gathered:
    """The gradients that the window gathers: those of everything prepared, as the engine reduces them."""

    run: Run
    precision: torch.dtype

    @property
    def divisor(self) -> int:
        """The number of processes where the engine averages their gradients, 1 where it adds them up."""
        engine = self.run.engine
        return engine.gradients.data_parallel_size if engine.gradients.reduction == "mean" else 1

    def total_weight(self, weight: Weight) -> Weight:
        """Add up a weight over the processes."""
        return self.run.engine.gradients.total_weight(weight, self.precision)

    def scale(self, factor: Weight) -> None:
        """Multiply the gradients of all prepared models and optimizers, each once."""
        # Optimizers may step tensors of no model, and models have parameters of no optimizer.
        parameters = {
            id(parameter): parameter
            for group in (
                *(model.parameters() for model in self.run.models),
                *(group["params"] for item in self.run.optimizers for group in item.param_groups),
            )
            for parameter in group
        }
        self.run.engine.gradients.scale(parameters.values(), factor)
