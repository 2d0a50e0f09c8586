"""The parameter groups in the file of an optimizer, against those of the optimizer that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from accel_ckpt.weights.model_tensors import without_wrapper_names
from accel_ops.modules import extract_model_from_parallel


def match_groups(
    file: str, index: int, state: Any, optimizer: Any, models: Sequence[Any]
) -> tuple[Any, list[str]]:
    """Compare an optimizer's saved groups with its own; if parameters have names there, number them.

    Args:
        file: What the file is called.
        index: The optimizer's number.
        state: What the file holds.
        optimizer: The optimizer, or how it is loaded.
        models: The models, or how they are loaded. Names are those of the parameters in their states.

    Returns:
        The state, with parameters numbered in the order of the optimizer's groups, and one line for each
        difference.
    """
    saved = state.get("param_groups") if isinstance(state, dict) else None
    inner = getattr(optimizer, "optimizer", optimizer)
    # One over flat parameters says what is in them.
    flat = vars(optimizer).get("names") if hasattr(optimizer, "__dict__") else None
    own = [group["params"] for group in getattr(inner, "param_groups", ())] if flat is None else flat
    if not saved or not own or any("params" not in group for group in saved):
        return state, []  # it has a form of its own, which it checks by itself
    sizes = [len(group["params"]) for group in saved], [len(group) for group in own]
    if sizes[0] != sizes[1]:
        return state, [
            f"{file} has parameter groups of {sizes[0]} parameters, and optimizer {index} has {sizes[1]}"
        ]
    # torch numbers parameters by default; then the order of the groups is all there is to compare.
    if not all(isinstance(name, str) for group in saved for name in group["params"]):
        return state, []
    named = _names(models) if flat is None else [(name, name) for group in flat for name in group]
    return _numbered(file, index, state, own, named)


def schedulers_of(schedulers: Sequence[Any], optimizers: Sequence[Any]) -> list[int]:
    """Return which schedulers set the learning rates of some optimizers.

    Args:
        schedulers: The schedulers, prepared or not.
        optimizers: The optimizers, or how they are loaded.
    """
    meant = {id(inner_optimizer(optimizer)) for optimizer in optimizers}
    own = [getattr(getattr(item, "scheduler", item), "optimizer", None) for item in schedulers]
    return [index for index, optimizer in enumerate(own) if id(inner_optimizer(optimizer)) in meant]


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of its wrappers.

    Args:
        optimizer: The optimizer, prepared or not, or how it is loaded.
    """
    # Prepared optimizers, and those that wrap one, hold it under this name.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _names(models: Sequence[Any]) -> list[tuple[str, Any]]:
    # How a sharded model is loaded is no module, but has it.
    plain = [item if isinstance(item, torch.nn.Module) else getattr(item, "model", None) for item in models]
    inner = [
        extract_model_from_parallel(item, keep_torch_compile=False) for item in plain if item is not None
    ]
    # Pairs, as two models may have the same names.
    return [pair for item in inner for pair in item.state_dict(keep_vars=True).items()]


def _numbered(
    file: str, index: int, state: Any, own: Sequence[Sequence[Any]], named: Sequence[tuple[str, Any]]
) -> tuple[Any, list[str]]:
    names: dict[int, list[str]] = {}  # of each parameter; tied ones have several
    for name, value in named:
        names.setdefault(id(value), []).append(name)
    given = {name: name for group in state["param_groups"] for name in group["params"]}
    spelled = without_wrapper_names(given, {name for name, _ in named})
    short = {original: name for name, original in spelled.items()}
    numbers: dict[str, int] = {}
    groups, lines = [], []
    for place, (group, parameters) in enumerate(zip(state["param_groups"], own, strict=True)):
        left = {short[original] for original in group["params"]}
        # Numbers run through all groups, as in torch's own state_dict.
        start = len(numbers)
        for parameter in parameters:
            called = names.get(id(parameter), [])
            found = next((name for name in called if name in left), None)
            if found is None:
                lines.append(
                    f"{file} has no {called[0]} in group {place} for optimizer {index}"
                    if called
                    else f"group {place} of optimizer {index} has a parameter of shape "
                    f"{list(parameter.shape)} that is in no model here, so that {file} has no name for it"
                )
            else:
                left.remove(found)
                numbers[spelled[found]] = len(numbers)
        lines += [f"{file} has {name} in group {place}, optimizer {index} has not" for name in sorted(left)]
        groups.append({**group, "params": list(range(start, len(numbers)))})
    # State that is of no parameter keeps its key.
    values = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}, lines
