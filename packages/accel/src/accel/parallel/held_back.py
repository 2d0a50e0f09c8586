"""What `fully_shard` keeps whole: gradients whose reduction is put off, and gathered parameters.

The one place that reads torch's private state of `fully_shard` (torch 2.6 to 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = ["free_gathered", "gathered", "gradients", "holding", "sharded_parameters"]


@contextlib.contextmanager
def holding(model: FSDPModule) -> Iterator[None]:
    """Keep whole gradients on their process, to be reduced by the first backward outside of the context."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def gradients(models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The whole gradients that are kept for the window's end."""
    found = []
    for model in models:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                found += [
                    item for parameter in sharded_parameters(part) if (item := _held(parameter)) is not None
                ]
    return found


def sharded_parameters(module: FSDPModule) -> Iterator[Any]:
    """What `fully_shard` keeps of each parameter that a module shards by itself."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one group at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        yield from group.fsdp_params


def gathered(models: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Whole parameters, each with the sharded one whose place it takes where it is gathered.

    A forward pass without a backward one leaves them in the model, for whoever asks for its parameters.
    """
    for model in models:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                for parameter in sharded_parameters(part):
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is not None:
                        yield whole, parameter.sharded_param


def free_gathered(parts: Iterable[FSDPModule]) -> None:
    """Put shards in the place of gathered parameters: what is still gathered misses an optimizer's step.

    What no optimizer steps may stay gathered.
    """
    for part in parts:
        if any(parameter.sharded_param.requires_grad for parameter in sharded_parameters(part)):
            part.reshard()


def _held(parameter: Any) -> torch.Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:  # in the dtype of the reduction
        return parameter.unsharded_accumulated_grad  # type: ignore[no-any-return]
    whole = getattr(parameter, "_unsharded_param", None)  # made by the first forward
    return None if whole is None else whole.grad
