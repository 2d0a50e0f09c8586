"""Optimizers made from a model's parameters, pointed to those that the model has after sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.torch_compat import shard_replicated


class ParameterMap:
    """Which parameter took the place of which; forgets a parameter when nobody else has it."""

    def __init__(self) -> None:
        self._new = WeakIdKeyDictionary()

    def record(self, before: dict[torch.nn.Parameter, list[str]], model: torch.nn.Module) -> None:
        """Note the present parameters of a model.

        Args:
            before: The names of each parameter that the model had.
            model: The model.
        """
        now = dict(model.named_parameters(remove_duplicate=False))
        for old, names in before.items():
            if now[names[0]] is not old:
                self.add(old, now[names[0]])

    def add(self, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
        """Note that one parameter took the place of another."""
        self._new[old] = new

    def contains(self, parameter: torch.Tensor) -> bool:
        """Whether something took the place of a tensor."""
        return parameter in self._new

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter that is used now."""
        # A chain: fp8 conversion replaces a parameter that sharding replaces again.
        while parameter in self._new:
            parameter = self._new[parameter]
        return parameter


def swap_parameters(optimizer: Any, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters of an optimizer in place: groups, options, schedules and state stay.

    Args:
        optimizer: The optimizer.
        current: Returns the trained parameter for one that the optimizer may have.

    Raises:
        ValueError: If a group is fused and its parameters cannot be stepped together.
    """
    for group in optimizer.param_groups:
        old = list(group["params"])
        new = [current(parameter) for parameter in old]
        _check_one_mesh(optimizer, group, new)
        for before, now in zip(old, new, strict=True):
            if before is not now and before in optimizer.state:
                optimizer.state[now] = _shard_state(optimizer.state.pop(before), now)
        # In place: wrappers and schedulers of other libraries keep this very list.
        group["params"][:] = new


def _shard_state(state: Any, parameter: torch.Tensor) -> Any:
    return {name: shard_like(value, parameter) for name, value in state.items()}


def shard_like(value: Any, parameter: torch.Tensor) -> Any:
    """A whole tensor of a parameter's shape, in parts as the parameter is; other values as they are.

    Every process has the whole tensor, so that nothing is communicated.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != parameter.shape or not value.dim():
        return value
    local_device = parameter.to_local().device
    whole = value.to(parameter.device_mesh.device_type)
    parts = shard_replicated(whole, parameter.device_mesh, parameter.placements)
    return parts if parts.device == local_device else parts.to(local_device)


def _check_one_mesh(optimizer: Any, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
    """Step parameters one by one where they are on several meshes: no operation takes such lists."""
    kinds = {item.device_mesh if isinstance(item, DTensor) else None for item in parameters}
    if len(kinds) < 2:
        return
    if group.get("fused"):
        raise ValueError(
            f"{type(optimizer).__name__}(fused=True): a parameter group holds sharded and whole parameters "
            "(or parameters on several meshes), which no fused step takes together. Leave fused out, or put "
            "the ones into a group of their own."
        )
    # One by one is slower, and right; a fused step is asked for by name, so that one is an error.
    if "foreach" in group:
        group["foreach"] = False
