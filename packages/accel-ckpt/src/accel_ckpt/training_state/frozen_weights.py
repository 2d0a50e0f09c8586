"""Split the weights of a model into files: frozen ones get their own, which incremental saves can link."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from accel_ckpt import file_names
from accel_ckpt.files.tensors import tied_groups
from accel_ckpt.weights.model_tensors import is_extra_state
from accel_ops.modules import extract_model_from_parallel


def frozen_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the frozen weights of a model.

    Args:
        model: The model, prepared or not.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # Tied weights appear under each of their names.
    named = inner.named_parameters(remove_duplicate=False)
    return frozenset(name for name, value in named if not value.requires_grad)


def split_into_files(
    state: Mapping[str, Any],
    index: int,
    frozen: Collection[str],
    safe_serialization: bool,
    *,
    gathered: bool = False,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Split a model's state into files.

    Args:
        state: The model's state dict.
        index: Which model it is, for the names of files.
        frozen: Names of the weights that get their own file.
        safe_serialization: Whether weights are safetensors.
        gathered: Whether one file of all weights is named as those gathered from FSDP, whatever
            `safe_serialization` says.

    Returns:
        (shards, indexes): the entries of each file, and the content of the index, if there is one, both by
        file name. There is one file unless some weights are frozen, and some are not.
    """
    extra: dict[str, Any] = {}
    if safe_serialization and not gathered:
        extra = {name: value for name, value in state.items() if is_extra_state(name, value)}
        if extra:
            state = {name: value for name, value in state.items() if name not in extra}
    extra_files = {file_names.extra_state_file(index): extra} if extra else {}
    frozen_weights = {name: value for name, value in state.items() if name in frozen}
    trained_weights = {name: value for name, value in state.items() if name not in frozen}
    if not frozen_weights or not trained_weights:
        name = (
            file_names.gathered_model_file(index)
            if gathered
            else file_names.model_file(index, safe_serialization)
        )
        return {name: state, **extra_files}, {}
    shards = {
        file_names.shard_file(index, number, 2, safe_serialization): shard
        for number, shard in ((1, frozen_weights), (2, trained_weights))
    }
    weight_map, size = {}, 0
    for name, shard in shards.items():
        # safetensors files have the other names of a tied weight; their index does not list them.
        left_out = {other for names in tied_groups(shard) for other in names[1:]}
        for weight, value in shard.items():
            if weight not in left_out:
                size += getattr(value, "nbytes", 0)
            if weight not in left_out or not safe_serialization:
                weight_map[weight] = name
    content = json.dumps(
        {"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True
    )
    return {**shards, **extra_files}, {
        file_names.index_file(index, safe_serialization): f"{content}\n".encode()
    }
