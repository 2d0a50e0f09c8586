"""Putting objects back as they were when a load fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel_ops.trees.walk import recursively_apply


def register_undo(item: Any, undo: contextlib.ExitStack) -> None:
    """Have an object with a `state_dict` put back as it is now.

    Args:
        item: The object. One that has no state yet, so that its `state_dict` fails, is not put back.
        undo: What is called if the load fails.
    """
    with contextlib.suppress(Exception):
        undo.callback(_restore_state, item, recursively_apply(_copy, item.state_dict()))


def _restore_state(item: Any, state: Any) -> None:
    # The error that made the load fail is the one to report.
    with contextlib.suppress(Exception):
        item.load_state_dict(state)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Like what is read from a file: on the CPU.
    return tensor.detach().clone() if isinstance(tensor, DTensor) else tensor.detach().to("cpu", copy=True)


@contextlib.contextmanager
def undo_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context that puts an optimizer's state and groups back if it is left with an error.

    Args:
        optimizer: The optimizer itself, in no wrapper.
    """
    restore_state = make_undo(optimizer)
    try:
        yield
    except BaseException:
        restore_state()
        raise


def make_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's state and groups back, if the state's tensors are not written to."""
    state, others = dict(optimizer.state), {**vars(optimizer)}
    restore_groups = make_groups_undo(optimizer)

    def restore_state() -> None:
        # Attributes as well, as a step may change them.
        vars(optimizer).update(others)
        # In place: what wraps another optimizer lets nobody set these two.
        optimizer.state.clear()
        optimizer.state.update(state)
        restore_groups()

    return restore_state


def make_groups_undo(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's groups back; their tensors stay the same, with the values of now."""
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
