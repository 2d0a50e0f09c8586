"""An optimizer's state by the names of parameters, some of which may have none.

A parameter has state after the first step with a gradient. torch's functions make such a step if an optimizer
has no state, which changes the training. Here only loading changes it.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.sharded.dcp_folder import read_folder, read_index
from accel_ckpt.training_state.undo import make_groups_undo, make_undo, undo_on_error
from accel_state.process.info import ProcessInfo

# torch's optimizers whose step begins by creating the state in a separate method.
_MAKE_STATE_FIRST = (torch.optim.Adam, torch.optim.AdamW)

# A sixteenth of the gradients and values is in memory at a time, besides the state.
_SLICES = 16

_FLAT = (
    "fsdp_version=1 flattens parameters into one vector, of which all or none have state: set "
    "use_orig_params=True, or fsdp_version=2."
)


def state_to_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's sharded state by names. Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer, which is not changed.
    """
    _reshard(model)
    with suppress_torch_warnings(), _without_a_step(optimizer):
        return get_optimizer_state_dict(model, [optimizer])  # a list: it may not be a class of torch


def sharded_state_to_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Like `state_to_save`, for a state that can be loaded sharded.

    Raises:
        ValueError: If it has state of no parameter, which torch would skip.
    """
    others = sorted(str(key) for key in optimizer.state if not isinstance(key, torch.Tensor))
    if others:
        raise ValueError(
            f"{type(optimizer).__name__}.state has {others}, which are of no parameter: sharded state is "
            "saved by the names of parameters. Keep it in the parameters' state or in param_groups."
        )
    return state_to_save(model, optimizer)


def set_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, full: bool = False
) -> None:
    """Set an optimizer's state by names; parameters without state there have none afterwards.

    Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer; unchanged if this fails.
        state: The state.
        full: Whether its tensors are full, and not sharded.

    Raises:
        ValueError: If some of the parameters in a flat parameter have state, and others have none.
    """
    # Not strict: a parameter may have no state.
    options = StateDictOptions(full_state_dict=full, strict=False)
    _reshard(model)
    with suppress_torch_warnings(), undo_on_error(optimizer), _without_a_step(optimizer):
        try:
            set_optimizer_state_dict(model, [optimizer], state, options=options)
        except ValueError as error:
            if "single flat parameter" not in str(error):
                raise
            raise ValueError(f"{error}. {_FLAT}") from error
        left = sorted(key for key in optimizer.state if isinstance(key, str))
        if left:  # torch takes them for state of no parameter
            raise ValueError(f"the checkpoint has state for {left}, and none for others. {_FLAT}")


def different_state(state: dict[str, Any], saved: Collection[str]) -> tuple[list[str], list[str]]:
    """Compare the state that an optimizer needs with that in a folder.

    Args:
        state: The result of `state_to_read`.
        saved: The names in the folder's index.

    Returns:
        The missing and the unexpected names, sorted.
    """
    # A private of torch.distributed.checkpoint: how DCP joins the names of an index with dots.
    wanted = flatten_state_dict(state)[0].keys()
    return sorted(wanted - set(saved)), sorted(set(saved) - wanted)


def load_sharded_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    process: ProcessInfo,
    *,
    index: Metadata | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Load an optimizer's sharded state, on all processes or on none. Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer; unchanged if this fails.
        folder: The folder of DCP.
        process: This process.
        index: The folder's index, if already read.
        state: The result of `state_to_read`, if already called; it is read into.

    Raises:
        CheckpointError: If the folder does not have what the optimizer needs.
        Exception: Any other error of this process; a CheckpointError on the other processes.
    """
    if index is None:
        index = read_index(folder, process)
    if state is None:
        state = state_to_read(model, optimizer, folder, index, process)
    read_folder(state, folder, process, index)
    with undo_on_error(optimizer):
        run_on_all_ranks(
            lambda: set_state(model, optimizer, state["optimizer"]), process, f"loading {folder.name}"
        )


@contextlib.contextmanager
def suppress_torch_warnings() -> Iterator[None]:
    """A context without torch's warnings about its own calls, and about NO_SHARD."""
    with warnings.catch_warnings():
        # torch's state_dict functions cause these themselves (torch 2.13): users cannot avoid them.
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
        warnings.filterwarnings("ignore", "Multiple backends are registered with this ProcessGroup")
        warnings.filterwarnings("ignore", ".*NO_SHARD.*full_state_dict will be returned")
        yield


def _reshard(model: torch.nn.Module) -> None:
    """Reshard parameters that a forward pass has gathered: torch reads the sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def _without_a_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    # torch makes no step if there are gradients.
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    smallest = min(parameters, key=torch.Tensor.numel, default=None)
    if smallest is None or any(item.grad is not None for item in parameters):
        yield
        return
    # get_ and set_optimizer_state_dict call torch's `_init_optim_state`, which steps an optimizer without
    # state unless some parameter has a gradient (torch 2.13); the smallest one costs least.
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    # Hooks are for training steps; torch has no other way to make a step without them.
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    vars(optimizer).update((name, OrderedDict()) for name in kept)
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def state_to_read(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    index: Metadata,
    process: ProcessInfo,
) -> dict[str, Any]:
    """Return the state to read from a folder, in new tensors, without parameters that had no state.

    Every process must call it.

    Args:
        model: The model that has the optimizer's parameters.
        optimizer: The optimizer, which is not changed.
        folder: The folder of DCP.
        index: Its index.
        process: This process.
    """
    saved = index.state_dict_metadata
    begin, end = "optimizer.param_groups.", ".params"
    # Empty strings as values: DCP replaces any value when it reads a non-tensor.
    named = {key: "" for key in saved if key.startswith(begin) and key.endswith(end)}
    read_folder(named, folder, process, index)
    saved_names = {name for names in named.values() for name in names}
    saved_prefixes = {key[:end] for key in saved for end, letter in enumerate(f"{key}.") if letter == "."}
    state = _new_state(model, optimizer, process)
    states = {
        name: values
        for name, values in state["state"].items()
        if name not in saved_names or f"optimizer.state.{name}" in saved_prefixes
    }
    # Steps and schedulers add keys to groups, which torch replaces. Copied, as the optimizer has these
    # tensors. `defaults` has the arguments of the optimizer; schedulers or steps added other keys of a group
    # later.
    needed = {"params", *getattr(optimizer, "defaults", ())}
    groups = [
        {
            key: deepcopy(value)
            for key, value in group.items()
            if key in needed or f"{begin}{i}.{key}" in saved_prefixes
        }
        for i, group in enumerate(state["param_groups"])
    ]
    return {"optimizer": {**state, "state": states, "param_groups": groups}}


def _new_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, process: ProcessInfo
) -> dict[str, Any]:
    """Return the state by names after a step with all gradients, and undo the step.

    Some parameters at a time, so that little memory is needed besides the state. For Adam only the beginning
    of a step runs, which changes nothing else.
    """
    _reshard(model)
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    # Restored at the end: the save may be in the middle of an accumulation window.
    gradients = [item.grad for item in parameters]
    trained = [item for item in parameters if item.requires_grad]
    restore_state = make_undo(optimizer)
    optimizer.state.clear()
    if callable(train := getattr(optimizer, "train", None)):
        train()  # a schedule-free optimizer only steps in this mode; without state nothing changes
    restore_groups = make_groups_undo(optimizer)

    def step() -> None:
        # A subclass may do more in its step; the method is private to torch, and may be removed.
        if type(optimizer) in _MAKE_STATE_FIRST and hasattr(optimizer, "_init_group"):
            _make_state(optimizer, trained)
            return
        for index in range(min(_SLICES, len(trained))):
            restore_groups()  # each is a first step: some optimizers only create state there
            _step_and_undo(optimizer, trained[index::_SLICES])

    try:
        for item in parameters:
            item.grad = None
        run_on_all_ranks(step, process, "creating the state of an optimizer")
        with suppress_torch_warnings():
            return get_optimizer_state_dict(model, [optimizer])
    finally:
        restore_state()
        for item, gradient in zip(parameters, gradients, strict=True):
            item.grad = gradient


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Create the state of some parameters of one of `_MAKE_STATE_FIRST`, as its step does."""
    # The group, and lists for the step.
    _, *lists = inspect.signature(optimizer._init_group).parameters  # type: ignore[attr-defined]
    try:
        for item in parameters:
            item.grad = item.detach()  # it only checks that there is one
        with torch.no_grad():
            for group in optimizer.param_groups:
                optimizer._init_group(group, *([] for _ in lists))  # type: ignore[attr-defined]
    finally:
        # At once, as these gradients are the weights themselves.
        for item in parameters:
            item.grad = None


def _step_and_undo(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Make a step of only some parameters, and undo it."""
    selected, values = set(parameters), [item.detach().clone() for item in parameters]
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for item in parameters:
            item.grad = torch.zeros_like(item)
        for group, items in groups:
            group["params"] = [item for item in items if item in selected]
        with _without_hooks(optimizer):
            type(optimizer).step(optimizer)  # a compiled step would be compiled again for each slice
    finally:
        for group, items in groups:
            group["params"] = items
        for item, value in zip(parameters, values, strict=True):
            item.grad = None
            item.detach().copy_(value)
