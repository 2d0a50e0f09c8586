"""Full states of sharded models and optimizers: gathered to save, sharded on load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel.engines.common.swap_parameters import shard_like


def gather_full_state(state: Any, keep: bool) -> Any:
    """Replace every sharded tensor in a tree by the full one, on the CPU; every process calls it.

    Tensors are gathered one at a time.

    Args:
        state: Dicts and lists with tensors.
        keep: Whether this process gets the result; others get None instead of sharded tensors.
    """

    def gather(value: Any) -> Any:
        if isinstance(value, DTensor):
            # A collective: also on processes that drop the result.
            full: torch.Tensor = value.full_tensor().detach()
            return full.cpu() if keep else None
        return value

    # A tied weight is gathered once, and stays one tensor.
    return _mapped(state, gather, {})


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
    """Tensors with the shapes and dtypes of a state dict, but no memory; tied ones are one tensor."""
    tied: dict[int, torch.Tensor] = {}
    result = type(state)()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            # One element, expanded to the full shape by strides of 0.
            empty = torch.empty(1, dtype=value.dtype)
            value = tied.setdefault(id(value), empty.expand(value.shape) if value.dim() else empty[0])
        result[name] = value
    return result


def with_names(state: Any, optimizer: Any, models: Iterable[torch.nn.Module]) -> Any:
    """Replace the numbers of parameters in an optimizer's state by names, as torch's FSDP does.

    Numbers stay if no single model has all parameters, as two models may have the same names, and in a state
    of another form than torch's.

    Args:
        state: What its `state_dict` returned.
        optimizer: The optimizer.
        models: The models.
    """
    ids = [id(item) for group in optimizer.param_groups for item in group["params"]]
    groups = state.get("param_groups", ()) if isinstance(state, dict) else ()
    if [number for group in groups for number in group.get("params", ())] != list(range(len(ids))):
        return state
    for model in models:
        names: dict[int, str] = {}  # the first one of a tied weight
        for name, value in model.state_dict(keep_vars=True).items():
            names.setdefault(id(value), name)
        if names.keys() >= set(ids):
            name_of = {number: names[item] for number, item in enumerate(ids)}
            named = [{**group, "params": [name_of[number] for number in group["params"]]} for group in groups]
            values = {name_of.get(key, key): value for key, value in state["state"].items()}
            return {**state, "state": values, "param_groups": named}
    return state


class FullStateOptimizer:
    """A sharded optimizer that saves and loads its full state.

    Args:
        optimizer: The optimizer.
        state: What `state_dict` returns: the gathered state.
    """

    def __init__(self, optimizer: Any, state: dict[str, Any] | None = None) -> None:
        self.optimizer = optimizer
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the gathered state."""
        assert self.state is not None, "it was gathered for saving"
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a full state, of which each process keeps its shard.

        Args:
            state: The state of an unsharded optimizer, numbered in the order of the groups.
        """
        parameters = [item for group in self.optimizer.param_groups for item in group["params"]]
        shards = {
            index: {name: shard_like(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
            if index < len(parameters)  # the optimizer rejects other numbers
        }
        self.optimizer.load_state_dict({**state, "state": {**state["state"], **shards}})


class FullStateModel:
    """A sharded model that saves and loads full weights.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return names and shapes of the full weights; tied ones are one tensor; values are undefined."""
        return empty_like_state(self.model.state_dict(keep_vars=True))

    def load_state_dict(self, state: dict[str, Any], **options: Any) -> Any:
        """Load full weights, of which each process keeps its shard.

        Args:
            state: Full tensors by name.
            **options: Those of the model's `load_state_dict`.
        """
        current = self.model.state_dict(keep_vars=True)
        shards = {
            name: shard_like(value, current[name]) if name in current else value
            for name, value in state.items()
        }
        return self.model.load_state_dict(shards, **options)
