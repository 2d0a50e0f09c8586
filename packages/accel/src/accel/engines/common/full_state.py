"""Whole states of sharded models and optimizers: gathered for saving, and sharded in loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel.engines.common.swap_parameters import shard_like


def gather_full_state(state: Any, keep: bool) -> Any:
    """Replace every sharded tensor in a tree by the whole one, on the CPU; every process calls it.

    One tensor is whole at a time on the device.

    Args:
        state: Dicts and lists with tensors.
        keep: Whether this process gets the result; others take part and get their tree without tensors.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            # Every process takes part, also one that drops the result: it is a collective.
            full: torch.Tensor = value.full_tensor().detach()
            return full.cpu() if keep else None
        return value

    # A tied weight is gathered once, and stays one tensor.
    return _mapped(state, whole, {})


def _mapped(state: Any, change: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    if isinstance(state, dict):
        result = type(state)()
        for key, value in state.items():
            result[key] = _mapped(value, change, seen)
        return result
    if isinstance(state, list | tuple):
        return type(state)(_mapped(value, change, seen) for value in state)
    if not isinstance(state, torch.Tensor):
        return state
    if id(state) not in seen:
        seen[id(state)] = change(state)
    return seen[id(state)]


def empty_like_state(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors without memory of the shapes and dtypes in a state dict; tied ones are one tensor."""
    found: dict[int, torch.Tensor] = {}
    result = type(state)()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            # One element, shown in the full shape by strides of 0: names, shapes and ties cost no memory.
            empty = torch.empty(1, dtype=value.dtype)
            value = found.setdefault(id(value), empty.expand(value.shape) if value.dim() else empty[0])
        result[name] = value
    return result


def with_names(state: Any, optimizer: Any, models: Iterable[torch.nn.Module]) -> Any:
    """Put the names of parameters for their numbers in an optimizer's state, as torch's FSDP does.

    Numbers stay where no single model has all parameters, as those of two models may have the same names,
    and in a state of another form than torch's.

    Args:
        state: What its `state_dict` returned.
        optimizer: The optimizer.
        models: The models.
    """
    given = [id(item) for group in optimizer.param_groups for item in group["params"]]
    groups = state.get("param_groups", ()) if isinstance(state, dict) else ()
    if [number for group in groups for number in group.get("params", ())] != list(range(len(given))):
        return state
    for model in models:
        names: dict[int, str] = {}  # of a tied weight the first
        for name, value in model.state_dict(keep_vars=True).items():
            names.setdefault(id(value), name)
        if names.keys() >= set(given):
            called = {number: names[item] for number, item in enumerate(given)}
            named = [{**group, "params": [called[number] for number in group["params"]]} for group in groups]
            values = {called.get(key, key): value for key, value in state["state"].items()}
            return {**state, "state": values, "param_groups": named}
    return state


class FullStateOptimizer:
    """A sharded optimizer as checkpoints see it: with the whole state.

    Args:
        optimizer: The optimizer.
        state: What its `state_dict` returns; every process has gathered it.
    """

    def __init__(self, optimizer: Any, state: dict[str, Any] | None = None) -> None:
        self.optimizer = optimizer
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the gathered state."""
        assert self.state is not None, "it was gathered for saving"
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state, of which each process keeps its part.

        Args:
            state: As an optimizer over whole parameters has it, numbered in the order of the groups.
        """
        parameters = [item for group in self.optimizer.param_groups for item in group["params"]]
        parts = {
            index: {name: shard_like(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
            if index < len(parameters)  # another number is for the optimizer to reject
        }
        self.optimizer.load_state_dict({**state, "state": {**state["state"], **parts}})


class FullStateModel:
    """A sharded model as checkpoints see it: with whole weights.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the whole weights; tied ones are one tensor, and values mean nothing."""
        return empty_like_state(self.model.state_dict(keep_vars=True))

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        """Load whole weights, of which each process keeps its part.

        Args:
            state: Whole tensors by name.
            **options: Those of the model's `load_state_dict`.
        """
        present = self.model.state_dict(keep_vars=True)
        parts = {
            name: shard_like(value, present[name]) if name in present else value
            for name, value in state.items()
        }
        return self.model.load_state_dict(parts, **options)
