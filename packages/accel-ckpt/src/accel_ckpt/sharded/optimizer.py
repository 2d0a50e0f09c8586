"""An optimizer's state by the names of parameters, where some of them have none.

A parameter has state from the first step with a gradient on. torch's functions make such a step to give state
to an optimizer that has none, which changes what is trained. Here nothing does but what is loaded.
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
from accel_state.imports.packages import is_torch_version
from accel_state.process.info import ProcessInfo

# Torch's own, of all versions from 2.6 on, whose steps begin by making the state in a method of its own.
_MAKE_STATE_FIRST = (torch.optim.Adam, torch.optim.AdamW)

# A sixteenth of the gradients and values is held at a time, beside the state.
_SHARES = 16

_FLAT = (
    "fsdp_version=1 lays parameters into one vector, of which all or none have state: set "
    "use_orig_params=True, or fsdp_version=2."
)


def state_to_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by names, in parts. Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer, which is left as it is.
    """
    _reshard(model)
    with suppress_torch_warnings(), _without_a_step(optimizer):
        return get_optimizer_state_dict(model, [optimizer])  # a list: it may be no class of torch's


def sharded_state_to_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `state_to_save`, of an optimizer whose state can be read in parts again.

    Raises:
        ValueError: If it has state that is of no parameter, which torch would pass over.
    """
    others = sorted(str(key) for key in optimizer.state if not isinstance(key, torch.Tensor))
    if others:
        raise ValueError(
            f"{type(optimizer).__name__}.state has {others}, which are of no parameter: state in parts is "
            "kept by the names of parameters. Keep it in the parameters' state or in param_groups."
        )
    return state_to_save(model, optimizer)


def set_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, full: bool = False
) -> None:
    """Give an optimizer a state by names; parameters that have none there have none afterwards.

    Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer; if this fails, it is as it was.
        state: The state.
        full: Whether its tensors are full, and not sharded.

    Raises:
        ValueError: If some of the parameters in a flat parameter have state, and others have none.
    """
    # Not strict, for torch: a parameter may have no state.
    options = StateDictOptions(full_state_dict=full, strict=False)
    filled = _for_all_parameters(state)
    _reshard(model)
    with suppress_torch_warnings(), undo_on_error(optimizer), _without_a_step(optimizer):
        try:
            set_optimizer_state_dict(model, [optimizer], filled, options=options)
        except ValueError as error:
            # The second is what torch says where parameters without state have an empty one.
            partial = ("single flat parameter", "Differing optimizer state names")
            if not any(text in str(error) for text in partial):
                raise
            raise ValueError(f"{error}. {_FLAT}") from error
        if filled is not state:
            for key in [key for key, value in optimizer.state.items() if not value]:
                del optimizer.state[key]
        left = sorted(key for key in optimizer.state if isinstance(key, str))
        if left:  # torch takes them for other state than of parameters
            raise ValueError(f"the checkpoint has state for {left}, and none for others. {_FLAT}")


def _for_all_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Have an entry, if an empty one, for each parameter: torch 2.6 fails without, 2.13 does not."""
    if is_torch_version(">=", "2.13") or not state.get("state"):
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    return {**state, "state": {name: {} for name in names} | state["state"]}


def different_state(state: dict[str, Any], saved: Collection[str]) -> tuple[list[str], list[str]]:
    """Compare what an optimizer needs with the state in a folder.

    Args:
        state: What `state_to_read` returned.
        saved: What the folder's index names.

    Returns:
        What the folder does not have, and what it has too much; sorted.
    """
    # A private of torch.distributed.checkpoint: how DCP makes the names of an index, joined with dots.
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
    """Load an optimizer's state from a folder, on all processes or on none. Every process must call it.

    Args:
        model: The model that has its parameters.
        optimizer: The optimizer; if this fails, it is as it was.
        folder: The folder of DCP.
        process: This process.
        index: The folder's index, if it was read before.
        state: What `state_to_read` returned, if it was called before; it is filled.

    Raises:
        CheckpointError: If the folder does not have what the optimizer needs.
        Exception: What else went wrong here; a CheckpointError on the other processes.
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
    """A context without what torch warns about its own calls, and the state of one shard."""
    with warnings.catch_warnings():
        # torch's state_dict functions themselves cause these (torch 2.13): a user
        # can change nothing about them.
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
        warnings.filterwarnings("ignore", "Multiple backends are registered with this ProcessGroup")
        warnings.filterwarnings("ignore", ".*NO_SHARD.*full_state_dict will be returned")
        yield


def _reshard(model: torch.nn.Module) -> None:
    """Put parameters in parts again where a forward pass alone has gathered them: torch reads by those."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def _without_a_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    # torch makes no step where there are gradients.
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    held = min(parameters, key=torch.Tensor.numel, default=None)
    if held is None or any(item.grad is not None for item in parameters):
        yield
        return
    # get_ and set_optimizer_state_dict call torch's `_init_optim_state`, which steps an optimizer without
    # state unless some parameter has a gradient (torch 2.13); the smallest one costs least.
    held.grad = torch.zeros_like(held)
    try:
        yield
    finally:
        held.grad = None


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    # They belong to steps of training; torch has no other way to make one without.
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
    """Return what is to be read of a folder, in new tensors, without parameters that had no state.

    Every process must call it.

    Args:
        model: The model that has the optimizer's parameters.
        optimizer: The optimizer, which is left as it is.
        folder: The folder of DCP.
        index: Its index.
        process: This process.
    """
    saved = index.state_dict_metadata
    begin, end = "optimizer.param_groups.", ".params"
    # An empty text as the value: DCP reads what is no tensor into the place of any value.
    named = {key: "" for key in saved if key.startswith(begin) and key.endswith(end)}
    read_folder(named, folder, process, index)
    known = {name for names in named.values() for name in names}
    there = {key[:end] for key in saved for end, letter in enumerate(f"{key}.") if letter == "."}
    state = _new_state(model, optimizer, process)
    states = {
        name: values
        for name, values in state["state"].items()
        if name not in known or f"optimizer.state.{name}" in there
    }
    # Steps and schedulers add to groups, which torch replaces. Copied, as tensors are the optimizer's own.
    # `defaults` has what the optimizer was made with; other keys of a group came
    # later, from schedulers or steps.
    needed = {"params", *getattr(optimizer, "defaults", ())}
    groups = [
        {
            key: deepcopy(value)
            for key, value in group.items()
            if key in needed or f"{begin}{i}.{key}" in there
        }
        for i, group in enumerate(state["param_groups"])
    ]
    return {"optimizer": {**state, "state": states, "param_groups": groups}}


def _new_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, process: ProcessInfo
) -> dict[str, Any]:
    """Return the state by names that steps with all gradients give, and undo them.

    A share of the parameters at a time, so that little memory is needed beside the state. Of Adam only the
    beginning of a step is made, which changes nothing else.
    """
    _reshard(model)
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    # Put back at the end: the save may lie in the middle of an accumulation window.
    gradients = [item.grad for item in parameters]
    trained = [item for item in parameters if item.requires_grad]
    restore_state = make_undo(optimizer)
    optimizer.state.clear()
    if callable(train := getattr(optimizer, "train", None)):
        train()  # of a schedule-free one, which makes steps in no other mode; without state nothing changes
    restore_groups = make_groups_undo(optimizer)

    def step() -> None:
        # A subclass may do more in its step; the method is torch's own affair, and may go.
        if type(optimizer) in _MAKE_STATE_FIRST and hasattr(optimizer, "_init_group"):
            _make_state(optimizer, trained)
            return
        for index in range(min(_SHARES, len(trained))):
            restore_groups()  # each is the first step: some optimizers make state in no other
            _step_and_undo(optimizer, trained[index::_SHARES])

    try:
        for item in parameters:
            item.grad = None
        run_on_all_ranks(step, process, "making the state of an optimizer")
        with suppress_torch_warnings():
            return get_optimizer_state_dict(model, [optimizer])
    finally:
        restore_state()
        for item, gradient in zip(parameters, gradients, strict=True):
            item.grad = gradient


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Have one of `_MAKE_STATE_FIRST` make the state of some parameters, as its step does."""
    # Lists that it fills for the step, and in torch 2.6 an option of the group.
    _, *takes = inspect.signature(optimizer._init_group).parameters  # type: ignore[attr-defined]
    try:
        for item in parameters:
            item.grad = item.detach()  # it asks whether there is one, and does not compute with it
        with torch.no_grad():
            for group in optimizer.param_groups:
                given = [group.get(name, []) for name in takes]
                optimizer._init_group(group, *given)  # type: ignore[attr-defined]
    finally:
        # Before anything else can see them, as they are the weights themselves.
        for item in parameters:
            item.grad = None


def _step_and_undo(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Make a step of some parameters, as of an optimizer that has no others."""
    meant, values = set(parameters), [item.detach().clone() for item in parameters]
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for item in parameters:
            item.grad = torch.zeros_like(item)
        for group, items in groups:
            group["params"] = [item for item in items if item in meant]
        with _without_hooks(optimizer):
            type(optimizer).step(optimizer)  # a compiled one would be compiled again for each share
    finally:
        for group, items in groups:
            group["params"] = items
        for item, value in zip(parameters, values, strict=True):
            item.grad = None
            item.detach().copy_(value)
