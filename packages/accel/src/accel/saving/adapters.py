"""Models with peft adapters: recognizing them, and finding the adapter's entries in a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accel_ckpt.errors import CheckpointError
from accel_ops.modules import extract_model_from_parallel
from accel_state.imports.available import is_peft_available
from accel_state.imports.packages import require

_WRAPPER = "_fsdp_wrapped_module"  # what FSDP's version 1 calls the module that it wraps; a private of torch


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
    """The names of the adapter's entries: as peft calls them in its files, and in the model's state.

    Args:
        model: A prepared model.
        state: The model's state, or any mapping with its names.

    Returns:
        The model's names by those of peft's files. A model without adapters has all of its names, under
        themselves: transformers' Trainer asks for the adapter alone of whatever it trains.
    """
    if not is_peft_model(model):
        return {name: name for name in state}
    peft = require("peft", "peft", "accel")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    # peft chooses and renames entries and leaves values as they are: here these are the names themselves.
    found = peft.get_peft_model_state_dict(inner, state_dict=with_wrapper_names(inner, state))
    return {_without_wrappers(name): named for name, named in found.items()}


def to_model_names(state: Mapping[str, Any], names: Mapping[str, str], file: str) -> dict[str, Any]:
    """Give the entries of an adapter's file the names that the model has for them.

    Args:
        state: What the file has.
        names: The model's names, as `adapter_names` returns them.
        file: What the file is called, for the message.

    Raises:
        CheckpointError: If the file has other entries than the model's adapters; it names them.
    """
    # Both ways, as strict loading checks: the model's own check cannot be strict for an adapter.
    unknown = [name for name in state if name not in names]
    missing = [name for name in names if name not in state]
    if unknown or missing:
        raise CheckpointError(
            f"{file} does not fit the model's adapters. It has {_some(unknown)} that they have not, and "
            f"lacks {_some(missing)}. Load it into a model with the adapters that it was saved of, or, if it "
            "has the whole model, with adapter_only=False."
        )
    return {names[name]: value for name, value in state.items()}


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else "nothing"


def with_wrapper_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names of a state by those that `named_modules` leads to, where FSDP's version 1 wraps modules.

    peft looks for its modules' names in the state, from which FSDP takes those of its wrappers out: it finds
    nothing inside of a wrapped layer, and saves nothing of it.

    Args:
        model: The model, with wrappers inside or without.
        names: Names of its state.
    """
    # A wrapper and what it wraps share a name: the wrapper's path is taken, as peft knows what is inside of
    # its own layers.
    paths: dict[str, str] = {}
    for path, _ in model.named_modules():
        # setdefault: named_modules lists the wrapper before what is inside of it.
        paths.setdefault(_without_wrappers(path), path)
    found = {}
    for name in names:
        path, dot, last = name.rpartition(".")
        found[f"{paths.get(path, path)}{dot}{last}"] = name
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _WRAPPER)
