"""Build models without memory for their weights, or with them on a device from the start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from accel_state import env

# Of a module, a name and a tensor; returns what is registered in the tensor's place, or None.
Hook = Callable[..., Any]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models with their parameters on the meta device, where they have shapes and take no memory.

    Weights are moved as each is registered, so that building takes the memory of the largest one, and
    initialising them takes no time. `load_checkpoint_in_model` fills such a model.

    Args:
        include_buffers: Put buffers on the meta device too. Checkpoints often lack them (tables of positions,
            say), so they are real by default, or as ACCELERATE_INIT_INCLUDE_BUFFERS says.

    Yields:
        Nothing.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(100_000, 100_000)  # 40 GB, if it were real
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models with their parameters on a device, one by one, without the full model on the CPU first.

    Modules that this thread builds inside are concerned, and those that were there before are left alone. A
    parameter that several modules share stays one. Of contexts in each other the innermost counts.

    Args:
        device: The device.
        include_buffers: Put buffers there too; None: as ACCELERATE_INIT_INCLUDE_BUFFERS says, by default
            not.

    Yields:
        Nothing.
    """
    if include_buffers is None:
        include_buffers = env.get("ACCELERATE_INIT_INCLUDE_BUFFERS")
    # Of a tensor there: "cuda" has an index then, as the devices have that it is compared with.
    hook = _moving_to(torch.empty(0, device=device).device)
    outer, _thread_hook.hook = _thread_hook.hook, hook
    with ExitStack() as ending:
        ending.callback(setattr, _thread_hook, "hook", outer)
        ending.enter_context(register_module_parameter_registration_hook(hook))
        if include_buffers:
            ending.enter_context(register_module_buffer_registration_hook(hook))
        yield


class _ThreadHook(threading.local):
    """The hook of this thread: torch calls each hook in all threads, and those of outer contexts too."""

    hook: Hook | None = None


_thread_hook = _ThreadHook()


def _moving_to(device: torch.device) -> Hook:
    """Return a hook that puts what a module registers on a device."""
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is registered twice is moved once

    def hook(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.device == device or _thread_hook.hook is not hook:
            return None
        if tensor not in moved:
            moved[tensor] = _copy_to(device, tensor)
        found: torch.Tensor = moved[tensor]
        return found

    return hook


def _copy_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or parameter of the same type on another device."""
    kind: Any = type(tensor)
    if is_lazy(tensor):  # its device is where it will get its values
        made: torch.Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
        return made
    data = tensor.detach().to(device)
    if not isinstance(tensor, torch.nn.Parameter):
        return data
    parameter: torch.Tensor = torch.Tensor._make_subclass(kind, data, tensor.requires_grad)
    # What libraries have noted on the parameter.
    parameter.__dict__.update(tensor.__dict__)
    return parameter
