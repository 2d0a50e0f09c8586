"""Replacing the parameters of optimizers by those that the model has after sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def swap_parameters(optimizer: Any, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters of an optimizer in place: groups, options, schedules and state stay.

    Args:
        optimizer: The optimizer.
        current: Returns the trained parameter for one that the optimizer may have.

    Raises:
        ValueError: If a group is fused and its parameters are on several meshes.
    """
    for group in optimizer.param_groups:
        old = list(group["params"])
        new = [current(parameter) for parameter in old]
        _check_one_mesh(optimizer, group, new)
        for before, now in zip(old, new, strict=True):
            if before is not now and before in optimizer.state:
                optimizer.state[now] = _shard_state(optimizer.state.pop(before), now)
        # In place: wrappers and schedulers of other libraries keep this list object.
        group["params"][:] = new


def _shard_state(state: Any, parameter: torch.Tensor) -> Any:
    return {name: shard_like(value, parameter) for name, value in state.items()}


def shard_like(value: Any, parameter: torch.Tensor) -> Any:
    """Shard a full tensor of a parameter's shape like the parameter; return other values unchanged.

    Every process has the full tensor, so nothing is communicated.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != parameter.shape or not value.dim():
        return value
    local_device = parameter.to_local().device
    full = value.to(parameter.device_mesh.device_type)
    # None: each process takes its part of what it has.
    shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shard if shard.device == local_device else shard.to(local_device)


def _check_one_mesh(optimizer: Any, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
    """Step parameters one by one if they are on several meshes: foreach operations do not take those."""
    kinds = {item.device_mesh if isinstance(item, DTensor) else None for item in parameters}
    if len(kinds) < 2:
        return
    if group.get("fused"):
        raise ValueError(
            f"{type(optimizer).__name__}(fused=True): a parameter group has sharded and unsharded "
            "parameters (or parameters on several meshes), which no fused step supports. Leave fused out, or "
            "put them into separate groups."
        )
    # One by one is slower, but correct; fused=True was requested explicitly, so that is an error.
    if "foreach" in group:
        group["foreach"] = False
