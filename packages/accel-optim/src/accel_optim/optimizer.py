"""A torch optimizer that steps at the accumulation window's boundary, through the fp16 scaler if any."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.trees.send import send_to_device
from accel_optim import scaler as scaling
from accel_optim.lomo import steps_in_backward
from accel_state.gradient import GradientState
from accel_state.logging.warning import warn
from accel_state.step_events import StepSkipped

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from accel_optim.gradient_sync import GradientSync
    from accel_optim.parameter_map import ParameterMap


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Move the tensors of an optimizer state to a device.

    Args:
        state: A tensor, or nested lists, tuples and dicts of tensors and other values.
        device: Where to.

    Returns:
        The same structure; tensors that were there already are the same objects.
    """
    return send_to_device(state, device)


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an optimizer's `step` so that its wrapper learns that a scaler really called it.

    `AcceleratedOptimizer` replaces no method: it learns this from torch's hooks (`register_step_pre_hook`).

    Args:
        accelerated_optimizer: The wrapper.
        method: The bound `step` of the optimizer that it wraps.

    Returns:
        The function to put in place of `method`.
    """
    reference = weakref.ref(accelerated_optimizer)  # the wrapper keeps the function

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        if (wrapper := reference()) is not None:
            wrapper._record_step()
        return method(*args, **kwargs)

    return step


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; steps and clears gradients only where gradients are synchronised.

    Inside an accumulation window `step` and `zero_grad` do nothing, so that the loop needs no `if`.
    Everything else is the wrapped optimizer's: parameter groups, state, hooks, and attributes that the
    wrapper does not define. Schedulers may be made from the wrapper or from the wrapped optimizer.

    Args:
        optimizer: The optimizer to wrap.
        device_placement: Whether the optimizer's state is moved to the device of its parameters, now and when
            a state dict is loaded.
        scaler: The gradient scaler to step through in fp16 training. Several optimizers may share one; the
            scale is then updated once all that have gradients have stepped.
        gradient_state: The accumulation window's state to follow; by default the newest.
        gradient_sync: The engine, if it trains other tensors than those of the user's model or reduces
            gradients.

    Raises:
        TypeError: If `optimizer` is wrapped already, or is not an optimizer.
    """

    # torch.optim.Optimizer.__init__ is not called: the wrapped optimizer's attributes are reached through
    # __getattr__. In particular its step hooks run once, in the real step.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: GradScaler | None = None,
        *,
        gradient_state: GradientState | None = None,
        gradient_sync: GradientSync | None = None,
    ) -> None:
        if isinstance(optimizer, AcceleratedOptimizer):
            raise TypeError(
                "The optimizer is an AcceleratedOptimizer already. Use it as it is, or wrap its .optimizer."
            )
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise TypeError(
                f"AcceleratedOptimizer wraps a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass "
                "an object with param_groups and step()."
            )
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self.gradient_sync = gradient_sync
        self._start(scaler)
        if device_placement:
            self._place_state()

    def _start(self, scaler: GradScaler | None) -> None:
        self._step_called = False
        self._step_was_skipped = False
        self._found_inf: torch.Tensor | None = None
        self._steps_inside_window = 0
        self._steps_in_backward = steps_in_backward(self.optimizer)
        self.set_scaler(scaler)

    def set_scaler(self, scaler: GradScaler | None) -> None:
        """Step through a gradient scaler from here on.

        Args:
            scaler: The scaler that the next losses are multiplied by; None for none.
        """
        # A disabled scaler passes everything through; None does the same at lower cost.
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            scaling.register(self.scaler, self)

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, per parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the wrapped optimizer's parameter groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: `params` and the group's own options.
        """
        if self.gradient_sync is None:
            self.optimizer.add_param_group({**param_group})  # a copy, which torch completes
            return
        parameters = self.gradient_sync.parameters
        trained = _trained(parameters, param_group["params"])
        self.optimizer.add_param_group({**param_group, "params": trained})
        parameters.register(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, each parameter's onto the parameter's device (with `device_placement`).

        Args:
            state_dict: What `state_dict` returned, on any device.
        """
        self.optimizer.load_state_dict(state_dict)
        if self.device_placement:
            self._place_state()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, at the window's boundary only.

        Args:
            set_to_none: Whether to drop the gradients (True) or fill them with zeros; None for the wrapped
                optimizer's default.
        """
        if not self.gradient_state.sync_gradients:
            return
        if self._steps_inside_window:
            self._steps_inside_window = 0
            warn(
                "zero_grad() before step() in the last micro-batch of an accumulation window discards the "
                "gradients of the previous micro-batches. Call zero_grad() after step().",
            )
        if self.scaler is not None:
            scaling.skip_step(self.scaler, self.optimizer)
        # Without an argument, which not every optimizer's zero_grad takes.
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.gradient_sync is not None:
            self.gradient_sync.drop_gradients(self._parameters())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer, at the window's boundary only.

        Args:
            closure: Re-evaluates the model and returns the loss, for optimizers such as LBFGS. Not called
                inside a window.

        Returns:
            What the wrapped optimizer's step returns; None inside a window, when a scaler skips the step, and
            for optimizers that have stepped in the backward pass (LOMO).

        Raises:
            ValueError: If both a closure and a scaler are in use.
        """
        if not self.gradient_state.sync_gradients:
            if closure is not None and not self._steps_inside_window:
                warn(
                    "step(closure) inside an accumulation window does not call the closure. Call backward "
                    "outside the closure, or set gradient_accumulation_steps=1.",
                )
            self._steps_inside_window += 1
            return None
        self._steps_inside_window, self._step_was_skipped = 0, False
        # Local names: __getattr__ makes each look-up on a wrapper slow, also of what it has.
        optimizer, sync, scaler = self.optimizer, self.gradient_sync, self.scaler
        events, result = self.gradient_state.events, None
        try:
            if events is not None:
                closure = events.begin_step(self, closure)
            if self._steps_in_backward:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedules look for
            else:
                if sync is not None:
                    sync.reduce_accumulated()
                    sync.parameters.reshard()
                if scaler is not None:
                    result = self._step_scaled(scaler, closure)
                else:
                    result = optimizer.step() if closure is None else optimizer.step(closure)
        except StepSkipped:
            self.skip_step()
        if events is not None:
            events.end_step(self)
        return result

    def skip_step(self) -> None:
        """Drop the gradients of the window instead of a step; a no-op inside a window.

        `step_was_skipped` is True until the next step, so that schedules do not advance.
        """
        if not self.gradient_state.sync_gradients:
            return
        self._steps_inside_window, self._found_inf = 0, None
        self.zero_grad()
        self._step_was_skipped = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last real step was skipped: fp16 gradients were not finite, or `skip_step` was called.

        Exact, and free except for fused optimizers, which decide on the device, and for those without torch's
        step hooks: reading this synchronizes then (once per step, as the scaler does for every other one).
        """
        if self._found_inf is not None:
            self._step_was_skipped = bool(self._found_inf.item())
            self._found_inf = None
        return self._step_was_skipped

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, once per step however often called; a no-op without a scaler."""
        if self.scaler is not None:
            scaling.unscale(self.scaler, self.optimizer)

    def train(self) -> None:
        """Put a schedule-free optimizer in training mode; a no-op for others."""
        # By its method: the schedule-free library need not be installed.
        if callable(train := getattr(self.optimizer, "train", None)):
            self._reshard()
            train()

    def eval(self) -> None:
        """Put a schedule-free optimizer in evaluation mode; a no-op for others."""
        if callable(evaluate := getattr(self.optimizer, "eval", None)):
            self._reshard()
            evaluate()

    def _reshard(self) -> None:
        if self.gradient_sync is not None:
            self.gradient_sync.parameters.reshard()

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes. `optimizer` itself is missing during unpickling.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # The gradient state belongs to the process, and the engine to an Accelerator.
        return {"optimizer": self.optimizer, "device_placement": self.device_placement, "scaler": self.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self.device_placement = state["device_placement"]
        self.gradient_sync = None
        self.gradient_state = GradientState()
        self._start(state["scaler"])

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _step_scaled(self, scaler: GradScaler, closure: Callable[[], Any] | None) -> Any:
        if closure is not None:
            raise ValueError(
                f"step(closure) of {type(self.optimizer).__name__} cannot run with an fp16 gradient scaler, "
                "which has to see the gradients before the step. Use mixed_precision='bf16' or 'no'."
            )
        inner = self.optimizer
        self._step_called, self._found_inf = False, None
        if not scaling.has_gradients(scaler, inner):
            return inner.step()
        scaling.begin_step(scaler, inner)
        with self._step_recorded():
            result = scaler.step(inner)
        if not self._step_called:
            # Skipped, or a step without torch's hooks: what the scaler has found says which.
            self._found_inf = scaling.overflow_flag(scaler, inner)
        scaling.end_step(scaler, inner)
        return result

    def _step_recorded(self) -> AbstractContextManager[Any]:
        """A context in which a step of the wrapped optimizer is recorded."""
        try:
            return self.optimizer.register_step_pre_hook(self._record_step)
        except AttributeError:  # not torch's, or its own __init__ leaves torch's out
            return contextlib.nullcontext()

    def _record_step(self, *_: Any) -> None:
        """Record that a scaler calls `step`, which it does for finite gradients only.

        It has waited for the device to know that, so that this waits no more. Fused optimizers are always
        called, and skip the update themselves according to the `found_inf` tensor that the scaler passes to
        them; it is kept, unread.
        """
        self._step_called = True
        self._found_inf = getattr(self.optimizer, "found_inf", None)

    def _place_state(self) -> None:
        for group in self.optimizer.param_groups:
            # torch keeps the step count on the host, to read it without synchronization, unless kernels read
            # it.
            skip = () if group.get("capturable", False) or group.get("fused", False) else ("step",)
            for parameter in group["params"]:
                values = self.optimizer.state.get(parameter)
                if isinstance(values, dict):
                    placed = {name: value for name, value in values.items() if name not in skip}
                    values.update(move_to_device(placed, parameter.device))


def _trained(parameters: ParameterMap, group: Any) -> Any:
    """The `params` of a group with the tensors that train in the place of parameters."""
    if isinstance(group, torch.Tensor):
        return parameters.trained_group([group])
    if isinstance(group, set | frozenset):
        return group  # torch rejects it: its order is not that of other processes
    group = list(group)
    if any(isinstance(item, tuple) for item in group):  # (name, parameter)
        return [(name, parameters.trained(parameter)) for name, parameter in group]
    return parameters.trained_group(group)
