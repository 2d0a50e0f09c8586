"""Comparison of the parameter groups in a file with those of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_ckpt.weights.model_tensors import without_wrapper_names
from accel_ops.modules import extract_model_from_parallel


def match_groups(
    file: str, index: int, state: Any, optimizer: Any, models: Sequence[Any]
) -> tuple[Any, list[str]]:
    """Compare an optimizer's saved groups with its current ones; replace names of parameters by numbers.

    Args:
        file: The file's name.
        index: The optimizer's number.
        state: The content of the file.
        optimizer: The optimizer, or the object that loads it.
        models: The models, or the objects that load them. Names are those of parameters in their states.

    Returns:
        The state, with parameters numbered in the order of the optimizer's groups, and one line for each
        difference.
    """
    saved = state.get("param_groups") if isinstance(state, dict) else None
    inner = getattr(optimizer, "optimizer", optimizer)
    # An optimizer of flat parameters has the names of the parameters in them.
    flat = vars(optimizer).get("names") if hasattr(optimizer, "__dict__") else None
    groups = [group["params"] for group in getattr(inner, "param_groups", ())] if flat is None else flat
    if not saved or not groups or any("params" not in group for group in saved):
        return state, []  # another format, which the optimizer checks itself
    sizes = [len(group["params"]) for group in saved], [len(group) for group in groups]
    if sizes[0] != sizes[1]:
        return state, [
            f"{file} has parameter groups of {sizes[0]} parameters, and optimizer {index} has {sizes[1]}"
        ]
    # torch numbers parameters by default; then only the sizes of the groups can be compared.
    if not all(isinstance(name, str) for group in saved for name in group["params"]):
        return state, []
    named_parameters = _names(models) if flat is None else [(name, name) for group in flat for name in group]
    return _numbered(file, index, state, groups, named_parameters)


def schedulers_of(schedulers: Sequence[Any], optimizers: Sequence[Any]) -> list[int]:
    """Return the indexes of the schedulers of some optimizers.

    Args:
        schedulers: The schedulers, prepared or not.
        optimizers: The optimizers, or the objects that load them.
    """
    optimizer_ids = {id(inner_optimizer(optimizer)) for optimizer in optimizers}
    scheduled = [getattr(getattr(item, "scheduler", item), "optimizer", None) for item in schedulers]
    return [
        index for index, optimizer in enumerate(scheduled) if id(inner_optimizer(optimizer)) in optimizer_ids
    ]


def inner_optimizer(optimizer: Any) -> Any:
    """Return the unwrapped optimizer.

    Args:
        optimizer: The optimizer, prepared or not, or the object that loads it.
    """
    # Prepared optimizers, and other wrappers, have it under this name.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _names(models: Sequence[Any]) -> list[tuple[str, Any]]:
    # The object that loads a sharded model is not a module, but has it.
    plain = [item if isinstance(item, torch.nn.Module) else getattr(item, "model", None) for item in models]
    inner = [
        extract_model_from_parallel(item, keep_torch_compile=False) for item in plain if item is not None
    ]
    # Pairs, as two models may have the same names.
    return [pair for item in inner for pair in item.state_dict(keep_vars=True).items()]


def _numbered(
    file: str,
    index: int,
    state: Any,
    groups: Sequence[Sequence[Any]],
    named_parameters: Sequence[tuple[str, Any]],
) -> tuple[Any, list[str]]:
    names: dict[int, list[str]] = {}  # of each parameter; tied ones have more than one
    for name, value in named_parameters:
        names.setdefault(id(value), []).append(name)
    saved = {name: name for group in state["param_groups"] for name in group["params"]}
    original_names = without_wrapper_names(saved, {name for name, _ in named_parameters})
    short_names = {original: name for name, original in original_names.items()}
    numbers: dict[str, int] = {}
    numbered_groups, lines = [], []
    for number, (group, parameters) in enumerate(zip(state["param_groups"], groups, strict=True)):
        remaining = {short_names[name] for name in group["params"]}
        # Numbers run through all groups, as in torch's state_dict.
        start = len(numbers)
        for parameter in parameters:
            candidates = names.get(id(parameter), [])
            matching = next((name for name in candidates if name in remaining), None)
            if matching is None:
                lines.append(
                    f"{file} has no {candidates[0]} in group {number} for optimizer {index}"
                    if candidates
                    else f"group {number} of optimizer {index} has a parameter of shape "
                    f"{list(parameter.shape)} that is in no model, so {file} has no name for it"
                )
            else:
                remaining.remove(matching)
                numbers[original_names[matching]] = len(numbers)
        lines += [
            f"{file} has {name} in group {number}, optimizer {index} does not" for name in sorted(remaining)
        ]
        numbered_groups.append({**group, "params": list(range(start, len(numbers)))})
    # State of no parameter keeps its key.
    values = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": values, "param_groups": numbered_groups}, lines
