"""Accumulation windows, backward, unscaling and clipping."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from accel.engines.common.gradients import tensors_with_grad
from accel.engines.common.loader import unwrap_loader
from accel.engines.start import make_scaler
from accel.training.prepare import find_prepared_optimizer, has_any_parameter
from accel_ops.collectives import operations
from accel_optim import lomo, precision
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scaler import true_on_any_rank
from accel_state.step_events import subscribe, unsubscribe
from accel_state.train_plan import check_accumulation_steps

if TYPE_CHECKING:
    from types import TracebackType

    from accel.engines import Engine
    from accel.training.run import Run
    from accel_optim.handlers import AutocastKwargs
    from accel_optim.weight import Weight
    from accel_optim.window import Window
    from accel_state.gradient import GradientState


def drop_gradients(run: Run) -> None:
    """Drop the gradients of an abandoned window: of everything prepared, also what an engine has not reduced.

    Nothing happens where no window is open.
    """
    if not run.engine.drop_gradients() and not run.window.step:
        return
    # The torch optimizers: a wrapper's zero_grad does nothing inside a window.
    optimizers = (getattr(item, "optimizer", item) for item in run.prepared.optimizers)
    for holder in (*run.prepared.models, *optimizers):
        holder.zero_grad()


def accumulate(
    run: Run, models: Sequence[torch.nn.Module], loader: Any
) -> contextlib.AbstractContextManager[Any]:
    """See `Accelerator.accumulate`."""
    # Nothing to hold back: the window itself is the context, as it counts micro-batches.
    if not run.engine.traits.reduces_in_backward:
        return run.window if loader is None else _MicroBatch(run.window, run.engine, (), loader)
    return _MicroBatch(run.window, run.engine, models, loader)


def set_accumulation_steps(run: Run, steps: int) -> None:
    """Set the number of micro-batches per optimizer step."""
    # In place: all handles on the state share the dictionary.
    run.gradient_state.plugin_kwargs.update({"num_steps": check_accumulation_steps(steps)})


def set_scaler(run: Run, scaler: torch.amp.GradScaler | None) -> None:
    """Scale losses by another scaler from here on, and step all prepared optimizers through it.

    Raises:
        ValueError: If the engine cannot step through it.
    """
    if scaler is not None:
        _check_scaler(run, scaler)
    run.scaler = scaler
    run.engine.context = replace(run.engine.context, scaler=scaler)
    for item in run.prepared.optimizers:
        if isinstance(item, AcceleratedOptimizer):
            item.set_scaler(scaler)


def _check_scaler(run: Run, scaler: torch.amp.GradScaler) -> None:
    traits = run.engine.traits
    default = make_scaler(traits, run.state)
    if default is None:
        raise ValueError(f"accelerator.scaler is set, but {run.engine.name} scales losses itself.")
    if not isinstance(scaler, type(default)):
        # With another one each process would decide from its own shards which steps to skip.
        fix = " Make it by accel.utils.get_fsdp2_grad_scaler()." if traits.shards_gradients else ""
        raise ValueError(
            f"accelerator.scaler: {run.engine.name} needs a {type(default).__name__}, got a "
            f"{type(scaler).__name__}.{fix}"
        )


def set_gradient_state(run: Run, state: GradientState) -> None:
    """Let the window, the engine, all that is prepared and the observers follow another gradient state.

    Raises:
        ValueError: If a loader is being iterated, whose end the other state would not see.
    """
    if run.gradient_state.in_dataloader:
        raise ValueError(
            "accelerator.gradient_state is set while a loader is being iterated. Set it outside of loops "
            "over loaders: the new state would not see the end of this one."
        )
    before, run.gradient_state = run.gradient_state, state
    run.window.gradient_state = state
    run.engine.context = replace(run.engine.context, gradient_state=state)
    loaders = (unwrap_loader(item) for item in run.prepared.loaders)
    for item in (*run.prepared.optimizers, *run.prepared.schedulers, *loaders):
        item.gradient_state = state
    run.misuse.follow(state)
    for observer in before.events.observers if before.events is not None else ():
        unsubscribe(before, observer)
        subscribe(state, observer)


def backward(run: Run, loss: torch.Tensor, weight: float | torch.Tensor | None, **kwargs: Any) -> None:
    """See `Accelerator.backward`."""
    if run.lomo is not None or "learning_rate" in kwargs:
        weight_option: dict[str, Any] = {} if weight is None else {"weight": weight}
        _backward_that_steps(run, loss, **weight_option, **kwargs)
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


def lomo_backward(run: Run, loss: torch.Tensor, learning_rate: float) -> None:
    """See `Accelerator.lomo_backward`."""

    def backward_and_step(loss: torch.Tensor) -> None:
        lomo.lomo_backward(run.lomo, loss, learning_rate, run.gradient_state.num_steps)

    if (events := run.gradient_state.events) is None:
        backward_and_step(loss)
    else:
        events.run_backward(backward_and_step, loss, {})


def clip_grad_norm(
    run: Run, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor | None:
    """See `Accelerator.clip_grad_norm_`."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if run.gradient_state.sync_gradients:
        run.engine.reduce_accumulated()
        if (events := run.gradient_state.events) is not None:
            events.publish_gradients()
        if run.scaler is not None or run.lomo is not None:
            tensors = _unscaled(run, tensors)
        norm = run.engine.clip_gradients(tensors, max_norm=max_norm, norm_type=norm_type)
        if events is not None:
            for notify in events.gradients_clipped:
                notify(norm)
        return norm
    # The gradients so far, of this process: they are neither reduced nor unscaled.
    norm = run.engine.clip_gradients(tensors, norm_type=norm_type)
    if norm is None or run.scaler is None:
        return norm
    return norm / run.scaler.scale(torch.ones((), device=norm.device))  # get_scale() would wait for it


def clip_grad_value(run: Run, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """See `Accelerator.clip_grad_value_`."""
    if run.gradient_state.sync_gradients:
        run.engine.reduce_accumulated()
        if (events := run.gradient_state.events) is not None:
            events.publish_gradients()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if run.scaler is not None or run.lomo is not None:
            tensors = _unscaled(run, tensors)
        run.engine.clip_gradients(tensors, clip_value=clip_value)


def autocast(run: Run, options: AutocastKwargs | None) -> contextlib.AbstractContextManager[Any]:
    """See `Accelerator.autocast`."""
    return precision.autocast(run.process.device.type, run.state.mixed_precision, options)


def _can_start_from(run: Run, loss: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether backward may start from a gradient of this loss, with the same numbers to the last bit.

    The scale of fp16 training is multiplied in before the division, other devices than these may divide
    inexactly, and torch has its own message for losses that are not a single number.
    """
    return (
        type(loss) is torch.Tensor
        and (loss.is_cpu or loss.is_cuda)
        and loss.numel() == 1
        and loss.is_floating_point()
        and run.scaler is None
        and run.engine.traits.takes_gradient
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
    lomo_backward(run, loss, learning_rate)


def unscale_gradients(run: Run, optimizer: Any) -> None:
    """See `Accelerator.unscale_gradients`."""
    if run.scaler is None or not run.gradient_state.sync_gradients:
        return
    # First, as what an engine still holds back is multiplied by the scale too.
    run.engine.reduce_accumulated()
    if (events := run.gradient_state.events) is not None:
        events.publish_gradients()
    chosen: Sequence[Any] = run.prepared.optimizers
    if optimizer is not None:
        requested = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        chosen = [find_prepared_optimizer(run, item) for item in requested]
    for item in chosen:
        item.unscale_gradients()


def _unscaled(run: Run, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Unscale the optimizers of these parameters alone: others may not have had their backward yet."""
    tensors = tensors_with_grad(run.engine.parameters, parameters)
    if run.lomo is not None and has_any_parameter(run.lomo, {id(tensor) for tensor in tensors}):
        lomo.warn_about_clipping(run.lomo)
    if run.scaler is not None and run.scaler.is_enabled():
        # By identity: parameters compare by value.
        wanted = {id(tensor) for tensor in tensors if tensor.grad is not None}
        optimizers = run.prepared.optimizers
        has_some = true_on_any_rank(run.scaler, [has_any_parameter(item, wanted) for item in optimizers])
        # The processes agree, since unscaling is a collective where each has shards of the gradients.
        owners = [item for item, has in zip(optimizers, has_some, strict=True) if has]
        unscaled = {id(each) for item in owners for group in item.param_groups for each in group["params"]}
        if wanted - unscaled:
            raise ValueError(
                f"{len(wanted - unscaled)} of the {len(wanted)} gradients to clip are multiplied by the loss "
                "scale of fp16 training, and no prepared optimizer has their parameters, so they are "
                "never divided by it. Pass the optimizer to prepare() as well."
            )
        unscale_gradients(run, owners)
    return tensors


class _MicroBatch:
    """The context of `accumulate`; a class, because a generator's context costs more than all else in it."""

    # One is made for every micro-batch.
    __slots__ = ("engine", "loader", "models", "no_sync_context", "window")

    def __init__(
        self, window: Window, engine: Engine, models: Sequence[torch.nn.Module], loader: Any
    ) -> None:
        self.window = window
        self.engine = engine
        self.models = models
        self.loader = loader
        self.no_sync_context: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        # The window first: it decides whether this micro-batch reduces gradients.
        self.window.__enter__(self.loader)
        if self.window.reduce_gradients:
            return
        try:
            self.no_sync_context = self._enter_no_sync()
        except BaseException:
            self.window.__exit__(*sys.exc_info())  # Python calls it only after an __enter__ that returned
            raise

    def _enter_no_sync(self) -> contextlib.AbstractContextManager[Any]:
        no_sync = self.engine.no_sync
        if len(self.models) == 1:  # the usual case, without a stack of contexts
            no_sync_context = no_sync(self.models[0])
            no_sync_context.__enter__()
            return no_sync_context
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(no_sync(model))
            return stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.no_sync_context is not None:
                self.no_sync_context.__exit__(None, None, None)
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
        """The number of processes over which the engine averages gradients."""
        return self.run.engine.data_parallel.reduced_over

    def total_weight(self, weight: Weight) -> Weight:
        """Add up a weight over the processes.

        Args:
            weight: A number, or a scalar tensor on the accelerator.

        Returns:
            The same on all processes: a number if that needs no device synchronization, else a tensor.

        Raises:
            ValueError: If the engine weights losses itself.
            RuntimeError: If processes may be out of data, inside `join_uneven_inputs`.
        """
        engine, process = self.run.engine, self.run.process
        if engine.traits.rejects_weights:
            raise ValueError(engine.traits.rejects_weights)
        if engine.data_parallel.uneven_inputs is not None and engine.data_parallel.uneven_inputs.active:
            raise RuntimeError(
                "backward(loss, weight=...) inside join_uneven_inputs: a process that is out of data takes "
                "no part in adding up the weights. Leave join_uneven_inputs out, and keep even_batches=True "
                "(the default) or give each process as many batches, the missing ones with a loss and a "
                "weight of 0."
            )
        # No collective, and no rounding to `precision`.
        if process.world_size == 1:
            return weight.to(self.precision) if isinstance(weight, torch.Tensor) else weight
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, dtype=self.precision, device=process.device)  # no copy, no wait
        weight = weight.to(process.device, self.precision)
        total: torch.Tensor = operations.reduce(weight, "sum", process=process)
        # Model-parallel processes work on the same samples, with the same weight.
        total = total / (process.world_size // engine.data_parallel.reduced_over)
        return total if total.device.type != "cpu" else float(total)

    def scale(self, factor: Weight) -> None:
        """Multiply the gradients of all prepared models and optimizers, each once."""
        # Optimizers may step tensors of no model, and models have parameters of no optimizer.
        parameters = {
            id(parameter): parameter
            for group in (
                *(model.parameters() for model in self.run.prepared.models),
                *(group["params"] for item in self.run.prepared.optimizers for group in item.param_groups),
            )
            for parameter in group
        }
        self.run.engine.scale_gradients(parameters.values(), factor)
