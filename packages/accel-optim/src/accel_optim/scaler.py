"""Loss scaling for fp16: making a scaler, and keeping one scaler right for several optimizers.

torch's rule for a scaler shared by optimizers is: every one steps, then the scale is updated once. Optimizers
in separate wrappers cannot see that moment, so it is detected here. A *round* is the time
between two updates of the scale. It ends when every optimizer of the scaler that has gradients has stepped;
with one optimizer, at each step. When one optimizer steps again while another still accumulates gradients,
the scale is updated anyway, and the existing gradients are multiplied by the change of the scale (a power of
two by default, so exactly).

Nothing here synchronizes with the device, except to combine flags of processes with sharded gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.amp.grad_scaler import GradScaler, OptState

from accel_state.enums import DistributedType
from accel_state.process.state import current_process


class _Wrapper(Protocol):
    """An optimizer's wrapper."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself."""


_OPTIMIZERS_OF: WeakKeyDictionary[GradScaler, list[ref[_Wrapper]]] = WeakKeyDictionary()
"""The optimizers of each scaler, in order of registration, which is the same on all processes."""


def get_grad_scaler(
    distributed_type: DistributedType | str | None = None, *, device_type: str | None = None, **kwargs: Any
) -> GradScaler:
    """Make the gradient scaler that a way of training needs.

    Args:
        distributed_type: The kind of distributed run. FSDP needs a scaler that combines the shards' flags,
            XLA has its own; every other type takes torch's.
        device_type: Type of the device that the losses are on ("cuda", "cpu", "xpu" ...); by default that of
            this process.
        **kwargs: Options of `torch.amp.GradScaler`: init_scale, growth_factor, backoff_factor,
            growth_interval, enabled. See `GradScalerKwargs`.

    Returns:
        The scaler.

    Raises:
        ValueError: If `distributed_type` is unknown.
        ImportError: If XLA is requested and torch_xla is not installed.
    """
    # Also by its name in any letter case; an unknown one raises.
    kind = DistributedType.NO if distributed_type is None else DistributedType(distributed_type)
    if kind == DistributedType.XLA:
        from accel_state.imports.packages import require

        scaler: GradScaler = require("torch_xla.amp", "xla", "accel-optim").GradScaler(**kwargs)
        return scaler
    if device_type is None:
        device_type = current_process().device.type
    if kind == DistributedType.FSDP:
        # On first use, as it imports torch's FSDP.
        from accel_optim.dtensor_scaler import DTensorGradScaler

        return DTensorGradScaler(device_type, **kwargs)
    return GradScaler(device_type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Make the gradient scaler of sharded models: the processes agree on which steps are skipped.

    Args:
        **kwargs: As those of `get_grad_scaler`.

    Returns:
        The scaler.
    """
    return get_grad_scaler(DistributedType.FSDP, **kwargs)


def has_gradients(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of the optimizer has a gradient, on any process that shards it.

    Args:
        scaler: The scaler, enabled; a DTensorGradScaler communicates.
        optimizer: The torch optimizer.
    """
    return true_on_any_rank(scaler, [_has_local_gradients(optimizer)])[0]


def _has_local_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def true_on_any_rank(scaler: GradScaler, flags: list[bool]) -> list[bool]:
    """Return which flags are true on any process, if gradients are sharded over processes.

    Args:
        scaler: The scaler; with a DTensorGradScaler all processes must call this.
        flags: As many, and in the same order, on all processes.
    """
    reduce = getattr(scaler, "true_on_any_rank", None)  # DTensorGradScaler, imported by few programs
    return flags if reduce is None else reduce(flags)


def _optimizers_of(scaler: GradScaler) -> Iterator[torch.optim.Optimizer | None]:
    """The torch optimizers of a scaler; None for deleted ones."""
    for reference in _OPTIMIZERS_OF.get(scaler, ()):
        wrapper = reference()
        # None, not left out: processes delete wrappers at different times.
        yield None if wrapper is None else wrapper.optimizer


def register(scaler: GradScaler, optimizer: _Wrapper) -> None:
    """Register an optimizer that steps through a scaler, with a weak reference; idempotent.

    Args:
        scaler: The scaler.
        optimizer: The wrapper; its own `optimizer` is what the scaler sees.
    """
    registered = _OPTIMIZERS_OF.setdefault(scaler, [])
    if not any(reference() is optimizer for reference in registered):
        registered.append(ref(optimizer))


def unscale(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Divide an optimizer's gradients by the scale, unless that was done since its last step.

    Args:
        scaler: The scaler, enabled.
        optimizer: The torch optimizer.
    """
    if not has_gradients(scaler, optimizer):
        return
    begin_step(scaler, optimizer)
    if _stage(scaler, optimizer) is OptState.READY:
        scaler.unscale_(optimizer)


def begin_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Start a new round if this optimizer has already stepped in the current one.

    Args:
        scaler: The scaler, enabled.
        optimizer: The torch optimizer that is going to step.
    """
    if _stage(scaler, optimizer) is OptState.STEPPED:
        _update_and_rescale(scaler)


def end_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Update the scale, if no other optimizer of the scaler still has gradients of this round.

    Args:
        scaler: The scaler, enabled.
        optimizer: The torch optimizer that has just stepped.
    """
    # Deleted ones have an entry too: the lists must have one length on all processes.
    waiting = [
        other is not None
        and other is not optimizer
        and _stage(scaler, other) is not OptState.STEPPED
        and _has_local_gradients(other)
        for other in _optimizers_of(scaler)
    ]
    if len(waiting) < 2 or not any(true_on_any_rank(scaler, waiting)):
        scaler.update()


def overflow_flag(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return whether gradients of the current step were not finite, on the device: above 0 if so.

    Args:
        scaler: The scaler, enabled.
        optimizer: The torch optimizer that the scaler has just stepped, or not.
    """
    flags = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return torch.stack([flag.to(flags[0].device) for flag in flags]).sum()


def skip_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Record that unscaled gradients are dropped instead of stepped with.

    The next ones must be unscaled again; and the scale is updated as after a step.

    Args:
        scaler: The scaler, enabled.
        optimizer: The torch optimizer whose gradients are about to be cleared.
    """
    if _stage(scaler, optimizer) is OptState.UNSCALED:
        # What `step` leaves behind: the next `unscale_` would raise otherwise.
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        end_step(scaler, optimizer)


def end_round(scaler: GradScaler | None) -> None:
    """End the current round, so that the scale counts all steps so far, as checkpoints need.

    An optimizer that has gradients, and has not stepped in this round, keeps the round open. Its gradients
    are multiplied by the change of the scale.

    Args:
        scaler: The scaler; a no-op without one, or when it is disabled.
    """
    if scaler is None or not scaler.is_enabled():
        return
    if any(state["stage"] is OptState.STEPPED for state in scaler._per_optimizer_states.values()):
        _update_and_rescale(scaler)


def forget_round(scaler: GradScaler | None) -> None:
    """Drop the current round, which does not belong to a loaded scale.

    Args:
        scaler: The scaler; a no-op without one, or when it is disabled.
    """
    if scaler is not None and scaler.is_enabled():
        scaler._per_optimizer_states.clear()


def _stage(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    # A plain lookup in the scaler's defaultdict would add an entry, which update() counts as an optimizer.
    state = scaler._per_optimizer_states.get(id(optimizer))
    return OptState.READY if state is None else state["stage"]


def _update_and_rescale(scaler: GradScaler) -> None:
    with_gradients = [
        other for other in _optimizers_of(scaler) if other is not None and _has_local_gradients(other)
    ]
    unscaled = {id(inner) for inner in with_gradients if _stage(scaler, inner) is OptState.UNSCALED}
    # Private, but the public get_scale synchronizes with the device.
    scale = scaler._get_scale_async()
    assert scale is not None, "an optimizer has stepped, so the scale exists"
    one = torch.ones_like(scale)
    # A copy, as update() changes the scale in place.
    before = scaler.scale(one)
    scaler.update()
    now = scaler.scale(one)
    for inner in with_gradients:
        # Unscaled gradients get the scale again; the others have the previous one.
        factor = now if id(inner) in unscaled else now / before
        for group in inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device, non_blocking=True))
