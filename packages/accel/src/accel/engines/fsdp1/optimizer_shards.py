"""States that optimizers of flattened parameters had before, cut as the parameters are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel.engines.fsdp1 import flat


def shard_states(optimizer: Any, models: Iterable[torch.nn.Module]) -> None:
    """Cut whole states of parameters that lie in flat ones, of which a process has a part; idempotent.

    Some optimizers (Adagrad) have a state from the beginning, in the shapes of whole parameters.

    Args:
        optimizer: With the parameters that users see (use_orig_params).
        models: Wrapped models.
    """
    for _, handle in flat.fsdp_units(models):
        whole = handle.flat_param
        if not handle.uses_sharded_strategy or whole._params is None:
            continue
        for parameter, place, shape in zip(
            whole._params, whole._shard_param_infos, whole._shapes, strict=True
        ):
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for name, value in state.items():
                # What has the parameter's shape belongs to its elements; counts of steps do not.
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                    state[name] = _cut(value, place).to(whole.device)


def _cut(value: torch.Tensor, place: Any) -> torch.Tensor:
    """This process's part of a whole tensor, as a vector."""
    if not place.in_shard:
        return value.new_empty(0)
    # The last index is included (torch's `_ShardParamInfo`); a copy, so that the whole state can be freed.
    return value.flatten()[place.intra_param_start_idx : place.intra_param_end_idx + 1].clone()
