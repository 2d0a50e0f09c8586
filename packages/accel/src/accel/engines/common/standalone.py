"""Trained parameters that belong to no prepared model, whose gradients no engine reduces in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def parameters_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All parameters of optimizers."""
    return (item for each in optimizers for group in each.param_groups for item in group["params"])


@torch.no_grad()
def send_values(process: ProcessInfo, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcast the first process's values, except of tensors that are on meta on some process.

    Args:
        process: This process.
        tensors: The tensors; every process calls it with the same ones.
    """
    # uint8, as not every backend reduces booleans.
    can_send = torch.tensor([not item.is_meta for item in tensors], dtype=torch.uint8, device=process.device)
    # All or none: a process without memory for a tensor cannot participate in its broadcast.
    dist.all_reduce(can_send, dist.ReduceOp.MIN)
    for item, wanted in zip(tensors, can_send.tolist(), strict=True):
        if wanted:
            # A copy on the process's device: backends only send contiguous memory of their own device.
            values = item.detach().to(process.device, copy=True).contiguous()
            dist.broadcast(values, 0)
            item.copy_(values)


def average_gradients(parameters: Sequence[torch.Tensor], process: ProcessInfo) -> None:
    """Average gradients over all processes; every process calls it with the same parameters.

    Args:
        parameters: The parameters. One without a gradient counts as 0, unless no process has one.
        process: This process.
    """
    # Outside of no_grad, which would cost more than this check in each step with nothing to average.
    if parameters and process.world_size > 1:
        _average(parameters, process)


@torch.no_grad()
def _average(parameters: Sequence[torch.Tensor], process: ProcessInfo) -> None:
    has_gradient = torch.tensor([item.grad is not None for item in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(process.device)
    # Where one process has a gradient all participate, with zeros where they have none.
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    chosen = [item for item, used in zip(parameters, has_gradient.tolist(), strict=True) if used]
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for item in chosen:
        if item.grad is None:
            item.grad = torch.zeros_like(item)
        elif item.grad.is_sparse:
            # An all-reduce cannot add sparse tensors with different indices.
            item.grad = item.grad.to_dense()
        # One collective per dtype: the tensors are few and small, so latency dominates.
        kinds.setdefault(item.grad.dtype, []).append(item.grad)
    for gradients in kinds.values():
        flat = [gradient.flatten().to(process.device) for gradient in gradients]
        total = torch.cat(flat) / process.world_size
        # Complex numbers as pairs of real ones: not every backend reduces them.
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
        averaged = torch.split(total, [item.numel() for item in flat])
        for gradient, item in zip(gradients, averaged, strict=True):
            gradient.copy_(item.view_as(gradient))
