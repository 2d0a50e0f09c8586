"""Build models without memory for their weights, or directly on a device."""

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

# Called with a module, a name and a tensor; returns the tensor to register instead, or None.
Hook = Callable[..., Any]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models with their parameters on the meta device, where they have shapes but take no memory.

    Each weight is moved when it is registered, so building takes the memory of the largest one, and
    initialisation takes no time. `load_checkpoint_in_model` loads weights into such a model.

    Args:
        include_buffers: Put buffers on the meta device too. Checkpoints often lack them (position
            tables, for example), so they are real by default; ACCELERATE_INIT_INCLUDE_BUFFERS changes that.

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
    """Build models directly on a device, parameter by parameter, without the full model on the CPU first.

    Applies to modules that this thread builds inside the context, not to existing ones. A parameter that
    several modules share stays shared. Of nested contexts, the innermost applies.

    Args:
        device: The device.
        include_buffers: Put buffers there too; None: as ACCELERATE_INIT_INCLUDE_BUFFERS says, by default
            no.

    Yields:
        Nothing.
    """
    if include_buffers is None:
        include_buffers = env.get("ACCELERATE_INIT_INCLUDE_BUFFERS")
    # Of a tensor on it: then "cuda" has an index, as the devices that it is compared with.
    hook = _moving_to(torch.empty(0, device=device).device)
    outer, _thread_hook.hook = _thread_hook.hook, hook
    with ExitStack() as ending:
        ending.callback(setattr, _thread_hook, "hook", outer)
        ending.enter_context(register_module_parameter_registration_hook(hook))
        if include_buffers:
            ending.enter_context(register_module_buffer_registration_hook(hook))
        yield


class _ThreadHook(threading.local):
    """The hook of this thread: torch calls hooks in all threads, including those of outer contexts."""

    hook: Hook | None = None


_thread_hook = _ThreadHook()


def _moving_to(device: torch.device) -> Hook:
    """Return a hook that moves what a module registers to a device."""
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that are registered twice are moved once

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
    if is_lazy(tensor):  # its device is set when it is initialised
        made: torch.Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
        return made
    data = tensor.detach().to(device)
    if not isinstance(tensor, torch.nn.Parameter):
        return data
    parameter: torch.Tensor = torch.Tensor._make_subclass(kind, data, tensor.requires_grad)
    # Attributes that libraries have set on the parameter.
    parameter.__dict__.update(tensor.__dict__)
    return parameter
