"""Raise or warn if moving a dispatched model would undo its placement."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn

from accel.big_models.hooks.base import ModelHook
from accel_state.logging.warning import warn

# Methods of torch.nn.Module, and those that other backends add to it.
_MOVES = ("to", "cpu", "cuda", "hpu", "ipu", "mlu", "mtia", "musa", "npu", "sdaa", "xpu")


class MoveGuard(ModelHook):
    """Replaces the methods that move a model, as long as the hook is attached.

    Args:
        offloaded: Whether weights of the model are offloaded, so that it cannot be moved.
    """

    def __init__(self, offloaded: bool) -> None:
        self.offloaded = offloaded

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Replace the methods."""
        for name in _MOVES:
            # A method that is already replaced on this instance stays.
            if hasattr(type(module), name) and name not in vars(module):
                vars(module)[name] = _GuardedMove(module, name, self.offloaded)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the methods."""
        for name in _MOVES:
            if isinstance(vars(module).get(name), _GuardedMove):
                del vars(module)[name]
        return module


class _GuardedMove:
    """A method that moves a dispatched model, to which it has a weak reference, to avoid a cycle."""

    def __init__(self, module: nn.Module, name: str, offloaded: bool) -> None:
        # As from a pickle, which cannot contain a weak reference.
        self.__setstate__((module, name, offloaded))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the model of this {self._name}() has been freed.")
        # Private in torch: Module.to parses its arguments with it; the device is
        # None where only the dtype changes.
        if self._name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            if self._offloaded:
                raise RuntimeError(
                    f"{type(module).__name__} has weights offloaded to CPU memory or to the disk: "
                    f"{self._name}() cannot move it. Remove its hooks first: "
                    "accel.hooks.remove_hook_from_submodules(model)."
                )
            warn(
                f"{type(module).__name__} is dispatched over devices, and {self._name}() moves it away from "
                "where its hooks expect it. Remove them first: "
                "accel.hooks.remove_hook_from_submodules(model)."
            )
        return getattr(type(module), self._name)(module, *args, **kwargs)

    def __getstate__(self) -> tuple[nn.Module | None, str, bool]:
        return self._module(), self._name, self._offloaded

    def __setstate__(self, state: tuple[Any, str, bool]) -> None:
        module, self._name, self._offloaded = state
        self._module = ref(module)
