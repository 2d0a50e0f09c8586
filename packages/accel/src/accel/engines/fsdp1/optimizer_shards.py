"""Existing optimizer states of flattened parameters, sharded like the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel.engines.fsdp1 import flat


def shard_states(optimizer: Any, models: Iterable[torch.nn.Module]) -> None:
    """Shard full optimizer states of parameters in flat ones; idempotent.

    Some optimizers (Adagrad) have a state from the beginning, in the shapes of full parameters.

    Args:
        optimizer: An optimizer with the original parameters (use_orig_params).
        models: Wrapped models.
    """
    for _, handle in flat.fsdp_units(models):
        flat_param = handle.flat_param
        if not handle.uses_sharded_strategy or flat_param._params is None:
            continue
        for parameter, place, shape in zip(
            flat_param._params, flat_param._shard_param_infos, flat_param._shapes, strict=True
        ):
            state = optimizer.state.get(parameter)
            if not isinstance(state, dict):
                continue
            for name, value in state.items():
                # Tensors of the parameter's shape have one value per element; step counts do not.
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                    state[name] = _local_shard(value, place).to(flat_param.device)


def _local_shard(value: torch.Tensor, place: Any) -> torch.Tensor:
    """This process's shard of a full tensor, as a vector."""
    if not place.in_shard:
        return value.new_empty(0)
    # The last index is included (torch's `_ShardParamInfo`); a copy, so that the full state can be freed.
    return value.flatten()[place.intra_param_start_idx : place.intra_param_end_idx + 1].clone()
