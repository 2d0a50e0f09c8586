"""Trained tensors that belong to no prepared model, whose gradients no engine reduces in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def parameters_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All that some optimizers step."""
    return (item for each in optimizers for group in each.param_groups for item in group["params"])


class LooseTensors:
    """Tensors that prepared optimizers step and no prepared model has: a temperature beside a model, say.

    They start with the first process's values, as the parameters of models do, and their gradients are
    averaged over all processes at the end of each accumulation window.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        self._process = process
        # A list and not a set: processes average in this order, which has to be the same on all.
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def take(self, tensors: Iterable[torch.Tensor], is_owned: Callable[[torch.Tensor], bool]) -> None:
        """Note new ones; every process calls it with the same tensors.

        Args:
            tensors: What optimizers step.
            is_owned: Whether a tensor belongs to a prepared model.
        """
        if self._process.world_size == 1:
            return
        # A tensor may have got a model since: the model is prepared now, and reduces it.
        known = [item for item in self._present() if not is_owned(item)]
        held = {id(item) for item in known}
        new = [item for item in dict.fromkeys(tensors) if id(item) not in held and not is_owned(item)]
        self._tensors = [weakref.ref(item) for item in (*known, *new)]
        if new:
            _send_values(new, self._process)

    def trained(self) -> list[torch.Tensor]:
        """Those that are trained now."""
        # Asked in each step, and most runs have none.
        return [item for item in self._present() if item.requires_grad] if self._tensors else []

    def _present(self) -> list[torch.Tensor]:
        found = (reference() for reference in self._tensors)
        return [item for item in found if item is not None]


@torch.no_grad()
def _send_values(tensors: Sequence[torch.Tensor], process: ProcessInfo) -> None:
    """Send the first process's values, but of what some process has no values of (the meta device)."""
    # uint8, as not every backend reduces booleans.
    can_send = torch.tensor([not item.is_meta for item in tensors], dtype=torch.uint8, device=process.device)
    # All or none: a process without memory for a tensor cannot take part in its broadcast.
    dist.all_reduce(can_send, dist.ReduceOp.MIN)
    for item, wanted in zip(tensors, can_send.tolist(), strict=True):
        if wanted:
            # A copy on the process's device: backends move contiguous memory of their own devices alone.
            values = item.detach().to(process.device, copy=True).contiguous()
            dist.broadcast(values, 0)
            item.copy_(values)


def average_gradients(parameters: Sequence[torch.Tensor], process: ProcessInfo) -> None:
    """Average gradients over all processes; every process calls it with the same parameters.

    Args:
        parameters: The parameters. One without a gradient counts as 0, unless no process has one.
        process: This process.
    """
    # Outside of no_grad, which costs more than this in each step of runs that have nothing to average.
    if parameters and process.world_size > 1:
        _average(parameters, process)


@torch.no_grad()
def _average(parameters: Sequence[torch.Tensor], process: ProcessInfo) -> None:
    has_gradient = torch.tensor([item.grad is not None for item in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(process.device)
    # Where one process has a gradient, all take part, with zeros where they have none.
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    chosen = [item for item, used in zip(parameters, has_gradient.tolist(), strict=True) if used]
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for item in chosen:
        if item.grad is None:
            item.grad = torch.zeros_like(item)
        elif item.grad.is_sparse:
            # Sparse tensors of other indices cannot be added up by an all-reduce.
            item.grad = item.grad.to_dense()
        # One collective for each dtype: these are few and small tensors, for which latency is all.
        kinds.setdefault(item.grad.dtype, []).append(item.grad)
    for gradients in kinds.values():
        parts = [gradient.flatten().to(process.device) for gradient in gradients]
        whole = torch.cat(parts) / process.world_size
        # Complex numbers as pairs of real ones: not every backend adds them up.
        dist.all_reduce(torch.view_as_real(whole) if whole.is_complex() else whole)
        averaged = torch.split(whole, [part.numel() for part in parts])
        for gradient, part in zip(gradients, averaged, strict=True):
            gradient.copy_(part.view_as(gradient))
