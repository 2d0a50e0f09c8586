"""Which weights of a model share a file: frozen ones have their own, where unchanged files are linked."""

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
    """Return the names of the weights of a model that do not train.

    Args:
        model: The model, prepared or not.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # Tied weights are there under each of their names.
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
    """Return what goes into which file.

    Args:
        state: The model's state dict.
        index: Which model it is, for the names of files.
        frozen: Names of weights that get a file of their own.
        safe_serialization: Whether weights are safetensors.
        gathered: Whether weights that are in one file are named as those that FSDP has gathered, whatever
            `safe_serialization` says.

    Returns:
        (parts, indexes): the part of the state in each file, and the contents of the index, if there is one,
        both by name. All is in one file unless some weights are frozen, and some are not.
    """
    extra: dict[str, Any] = {}
    if safe_serialization and not gathered:
        extra = {name: value for name, value in state.items() if is_extra_state(name, value)}
        if extra:
            state = {name: value for name, value in state.items() if name not in extra}
    beside = {file_names.extra_state_file(index): extra} if extra else {}
    still = {name: value for name, value in state.items() if name in frozen}
    others = {name: value for name, value in state.items() if name not in frozen}
    if not still or not others:
        name = (
            file_names.gathered_model_file(index)
            if gathered
            else file_names.model_file(index, safe_serialization)
        )
        return {name: state, **beside}, {}
    parts = {
        file_names.shard_file(index, number, 2, safe_serialization): part
        for number, part in ((1, still), (2, others))
    }
    weight_map, size = {}, 0
    for name, part in parts.items():
        # safetensors know the other names of a tied weight, which an index of them does not list.
        left_out = {other for names in tied_groups(part) for other in names[1:]}
        for weight, value in part.items():
            if weight not in left_out:
                size += getattr(value, "nbytes", 0)
            if weight not in left_out or not safe_serialization:
                weight_map[weight] = name
    content = json.dumps(
        {"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True
    )
    return {**parts, **beside}, {file_names.index_file(index, safe_serialization): f"{content}\n".encode()}
