"""Putting objects back as they were when a load fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accel_ops.trees.walk import recursively_apply


def keep(item: Any, undo: contextlib.ExitStack) -> None:
    """Have an object with a `state_dict` put back as it is now.

    Args:
        item: The object. One that has no state yet, so that its `state_dict` fails, is not put back.
        undo: What is called if the load fails.
    """
    with contextlib.suppress(Exception):
        undo.callback(_put_back, item, recursively_apply(_copy, item.state_dict()))


def _put_back(item: Any, state: Any) -> None:
    # The error that made the load fail is the one to report.
    with contextlib.suppress(Exception):
        item.load_state_dict(state)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Like what is read from a file: on the CPU.
    return tensor.detach().clone() if isinstance(tensor, DTensor) else tensor.detach().to("cpu", copy=True)


@contextlib.contextmanager
def unchanged_by_failure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context that puts an optimizer's state and groups back if it is left with an error.

    Args:
        optimizer: The optimizer itself, in no wrapper.
    """
    put_back = remember(optimizer)
    try:
        yield
    except BaseException:
        put_back()
        raise


def remember(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's state and groups back, if the state's tensors are not written to."""
    state, others = dict(optimizer.state), {**vars(optimizer)}
    put_groups_back = remember_groups(optimizer)

    def put_back() -> None:
        # Attributes as well, as a step may change them.
        vars(optimizer).update(others)
        # In place: what wraps another optimizer lets nobody set these two.
        optimizer.state.clear()
        optimizer.state.update(state)
        put_groups_back()

    return put_back


def remember_groups(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what puts an optimizer's groups back; their tensors stay the same, with the values of now."""
    groups = [
        (group, dict(group), {key: value.clone() for key, value in group.items() if torch.is_tensor(value)})
        for group in optimizer.param_groups
    ]

    def put_back() -> None:
        for group, values, copies in groups:
            group.clear()
            group.update(values)
            for key, copy in copies.items():
                group[key].copy_(copy)
        optimizer.param_groups[:] = [group for group, *_ in groups]

    return put_back
