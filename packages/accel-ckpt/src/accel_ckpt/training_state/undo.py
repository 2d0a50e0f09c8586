"""Restore objects when a load fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel_ops.trees.walk import recursively_apply


def register_undo(item: Any, undo: contextlib.ExitStack) -> None:
    """Register a callback that restores an object with a `state_dict` to its current state.

    Args:
        item: The object. It is not restored if its `state_dict` fails, as it has no state yet.
        undo: The stack of callbacks that is closed if the load fails.
    """
    with contextlib.suppress(Exception):
        undo.callback(_restore_state, item, recursively_apply(_copy, item.state_dict()))


def _restore_state(item: Any, state: Any) -> None:
    # The error that made the load fail is the one to report.
    with contextlib.suppress(Exception):
        item.load_state_dict(state)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # On the CPU, as if read from a file.
    return tensor.detach().clone() if isinstance(tensor, DTensor) else tensor.detach().to("cpu", copy=True)


@contextlib.contextmanager
def undo_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context that restores an optimizer's state and groups if it is left with an error.

    Args:
        optimizer: The unwrapped optimizer.
    """
    restore_state = make_undo(optimizer)
    try:
        yield
    except BaseException:
        restore_state()
        raise


def make_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's state and groups; state tensors are not copied."""
    state, attributes = dict(optimizer.state), {**vars(optimizer)}
    restore_groups = make_groups_undo(optimizer)

    def restore_state() -> None:
        # Attributes too, as a step may change them.
        vars(optimizer).update(attributes)
        # In place: wrappers of optimizers do not allow setting these two.
        optimizer.state.clear()
        optimizer.state.update(state)
        restore_groups()

    return restore_state


def make_groups_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups, with copies of the values of their tensors."""
    groups = [
        (group, dict(group), {key: value.clone() for key, value in group.items() if torch.is_tensor(value)})
        for group in optimizer.param_groups
    ]

    def restore_state() -> None:
        for group, values, copies in groups:
            group.clear()
            group.update(values)
            for key, copy in copies.items():
                group[key].copy_(copy)
        optimizer.param_groups[:] = [group for group, *_ in groups]

    return restore_state
