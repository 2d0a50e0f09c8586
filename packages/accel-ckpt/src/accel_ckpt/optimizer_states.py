"""An optimizer's state by the names of parameters, where some of them have none.

A parameter has state from the first step with a gradient on. torch's `get_optimizer_state_dict` makes a step
to give state to an optimizer that has none; here that is taken back wherever it would last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

__all__ = ["put_back", "state_to_read", "state_to_save"]


def state_to_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by names; of one that has none, its groups alone. It is left as it is.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer.
    """
    fresh = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if fresh:
        optimizer.state.clear()
        state["state"] = {}
    return state


def state_to_read(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, keys: Collection[str], known: Collection[str]
) -> dict[str, Any]:
    """Return the state by names that is to be read from a folder, in tensors that the optimizer has now.

    It gets state for all parameters that are trained. Those that were saved without are left out.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer; `put_back` undoes what is done to it.
        keys: What the folder has.
        known: The parameters that are in the folder's groups.
    """
    state: dict[str, Any] = _whole_state(model, optimizer)
    stateful = {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
    state["state"] = {
        name: values
        for name, values in state["state"].items()
        if name not in known or f"optimizer.state.{name}" in stateful
    }
    return state


def put_back(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Give an optimizer the state of parameters that it had.

    Args:
        optimizer: The optimizer.
        state: A copy of its `state`.
    """
    optimizer.state.clear()
    optimizer.state.update(state)


def _whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    # torch gives state to an optimizer that has none, if there are no gradients: both are taken away.
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    if any(item.requires_grad and item not in optimizer.state for item in parameters):
        optimizer.state.clear()
    gradients = [item.grad for item in parameters]
    for item in parameters:
        item.grad = None
    try:
        return get_optimizer_state_dict(model, optimizer)
    finally:
        for item, gradient in zip(parameters, gradients, strict=True):
            item.grad = gradient
