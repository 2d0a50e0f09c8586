"""Models with peft adapters: recognizing them, and finding the adapter's entries in a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_ckpt.errors import CheckpointError
from accel_ops.modules import extract_model_from_parallel
from accel_state.imports.available import is_peft_available
from accel_state.imports.packages import require

_WRAPPER = "_fsdp_wrapped_module"  # FSDP1's name of the wrapped module; a private of torch


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model is a peft.PeftModel, under any wrapper of parallel training.

    Args:
        model: The model; compiled or not, wrapped or not.
    """
    if not is_peft_available():
        return False
    peft = require("peft", "peft", "accel")
    return isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def adapter_names(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the adapter's entries in the model's state, by their names in peft's files.

    Args:
        model: A prepared model.
        state: The model's state, or any mapping with its names.

    Returns:
        The model's names by those of peft's files. A model without adapters maps all names to themselves:
        transformers' Trainer requests only the adapter of any model.
    """
    if not is_peft_model(model):
        return {name: name for name in state}
    peft = require("peft", "peft", "accel")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # peft selects and renames entries, and does not change values: here the values are the names.
    adapter_state = peft.get_peft_model_state_dict(inner, state_dict=with_wrapper_names(inner, state))
    return {_without_wrappers(name): named for name, named in adapter_state.items()}


def to_model_names(state: Mapping[str, Any], names: Mapping[str, str], file: str) -> dict[str, Any]:
    """Rename the entries of an adapter's file to the names in the model.

    Args:
        state: The content of the file.
        names: The model's names, as `adapter_names` returns them.
        file: The name of the file, for the message.

    Raises:
        CheckpointError: If the file has other entries than the model's adapters; it names them.
    """
    # Both ways, as strict loading checks: the model's own check cannot be strict for an adapter.
    unknown = [name for name in state if name not in names]
    missing = [name for name in names if name not in state]
    if unknown or missing:
        raise CheckpointError(
            f"{file} does not fit the model's adapters. It has {_shortened(unknown)} that they do not have, "
            f"and lacks {_shortened(missing)}. Load it into a model with the adapters that were saved, or, "
            "if it has the full model, with adapter_only=False."
        )
    return {names[name]: value for name, value in state.items()}


def _shortened(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else "nothing"


def with_wrapper_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names of a state by the paths of `named_modules`, where FSDP1 wraps modules.

    peft looks for its modules' names in the state, from which FSDP removes those of its wrappers: without
    this it would save nothing of a wrapped layer.

    Args:
        model: The model, with wrappers inside or without.
        names: Names of its state.
    """
    # A wrapper and the wrapped module have the same name: the wrapper's path is used, as peft knows the
    # structure of its own layers.
    paths: dict[str, str] = {}
    for path, _ in model.named_modules():
        # setdefault: named_modules lists a wrapper before the wrapped module.
        paths.setdefault(_without_wrappers(path), path)
    adapter_state = {}
    for name in names:
        path, dot, last = name.rpartition(".")
        adapter_state[f"{paths.get(path, path)}{dot}{last}"] = name
    return adapter_state


def _without_wrappers(name: str) -> str:
    return ".".join(item for item in name.split(".") if item != _WRAPPER)
