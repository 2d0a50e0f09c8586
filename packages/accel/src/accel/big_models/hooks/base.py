"""Hooks that run before and after a module's forward, with its keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn

from accel_ops.modules import WeakForward, weak_forward
from accel_ops.signatures import signature

# Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModelHook:
    """Base class of hooks: methods that are called before and after a module's forward.

    Unlike the hooks of torch, these see and may change keyword arguments.

    Attributes:
        no_grad: Whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is added to it.

        Args:
            module: The module.

        Returns:
            The module that gets the hook.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Prepare a call of forward. If this raises, it must leave the module as it was.

        Args:
            module: The module.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            (args, kwargs): the arguments for forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Process what forward returned.

        Args:
            module: The module.
            output: What it returned.

        Returns:
            The output for the caller.
        """
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo `pre_forward` after forward raised, instead of `post_forward`.

        Args:
            module: The module.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed.

        Args:
            module: The module.

        Returns:
            The module.
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks as one; each method calls those of the hooks in their order.

    Args:
        *hooks: The hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module with each hook; if one fails, those before it are undone."""
        done: list[ModelHook] = []
        try:
            for hook in self.hooks:
                module = hook.init_hook(module)
                done.append(hook)
        except BaseException:
            for hook in reversed(done):
                module = hook.detach_hook(module)
            raise
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Prepare a call with each hook; if one fails, those before it are undone."""
        count = 0
        try:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                count += 1
        except BaseException:
            # Except the one that failed, which has left the module as it was.
            for hook in self.hooks[:count]:
                hook.forward_failed(module)
            raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Process the output with each hook; if one fails, `forward_failed` of those after it is called."""
        count = 0
        try:
            for hook in self.hooks:
                count += 1
                output = hook.post_forward(module, output)
        except BaseException:
            for hook in self.hooks[count:]:
                hook.forward_failed(module)
            raise
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo `pre_forward` of each hook."""
        for hook in self.hooks:
            hook.forward_failed(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` of each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class HookedForward:
    """The forward of a module that has a hook.

    It has a weak reference to the module, which refers to it: a cycle would keep the weights until the
    garbage collector runs. For `inspect.signature` it looks like the original forward.

    Args:
        module: The module, with its `_hf_hook` and its `_old_forward`.

    Attributes:
        retired: The original forward, if the hook was removed while another wrapper still calls this.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__setstate__((module, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward, between the methods of the hook."""
        # The hook was removed, but another wrapper still has this forward.
        if self.retired is not None:
            return self.retired(*args, **kwargs)
        module: Any = self._module()
        if module is None:
            raise ReferenceError(f"the {self._name} of this hook has been freed: keep the module itself.")
        # Read at each call, as a hook may have been appended.
        hook: ModelHook = module._hf_hook
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        try:
            if hook.no_grad:
                with torch.no_grad():
                    output = module._old_forward(*args, **kwargs)
            else:
                output = module._old_forward(*args, **kwargs)
        except BaseException:
            hook.forward_failed(module)
            raise
        return hook.post_forward(module, output)

    def __getattr__(self, name: str) -> Any:
        state = vars(self)
        module = state["_module"]() if "_module" in state else None
        forward = state.get("retired") or (vars(module).get("_old_forward") if module is not None else None)
        if forward is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # inspect.signature(model.forward) reads it; transformers finds a model's inputs this way.
        return signature(forward) if name == "__signature__" else getattr(forward, name)

    def __getstate__(self) -> tuple[nn.Module | None, Callable[..., Any] | None]:
        return self._module(), self.retired

    def __setstate__(self, state: tuple[Any, Callable[..., Any] | None]) -> None:
        module, self.retired = state
        self._module = ref(module)
        self._name = type(module).__name__


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook to a module, whose `forward` then calls the hook.

    The module keeps the hook as `_hf_hook`, and the original forward as `_old_forward`.

    Args:
        module: The module. An existing hook is removed first.
        hook: The hook.
        append: Keep the existing hook, and call this one after it, both in a `SequentialHook`.

    Returns:
        The module.

    Raises:
        TypeError: If `hook` is not a `ModelHook`, or `module` not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a hook is added to a torch.nn.Module, not to {type(module).__name__}.")
    if not isinstance(hook, ModelHook):
        raise TypeError(
            f"hook must be an instance of a ModelHook, not {hook!r}. Derive its class from ModelHook."
        )
    old: ModelHook | None = vars(module).get("_hf_hook")
    if old is not None and not append:
        remove_hook_from_module(module)
    module = hook.init_hook(module)
    if old is not None and append:
        module._hf_hook = SequentialHook(*_hooks_of(old), *_hooks_of(hook))  # type: ignore[assignment]
        return module
    module._hf_hook = hook  # type: ignore[assignment]
    module._old_forward = weak_forward(module.forward, module)  # type: ignore[assignment]
    module.forward = module._hooked_forward = HookedForward(module)  # type: ignore[assignment]
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, if it has one, and restore its forward and attributes.

    Args:
        module: The module.
        recurse: Also remove the hooks of all modules inside of it.

    Returns:
        The module.
    """
    hook: ModelHook | None = vars(module).get("_hf_hook")
    if hook is not None:
        hook.detach_hook(module)
        _restore_forward(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules inside of it.

    Args:
        module: The module.
    """
    remove_hook_from_module(module, recurse=True)


def _hooks_of(hook: ModelHook) -> tuple[ModelHook, ...]:
    # Of exactly this class: a subclass may do more than its hooks.
    return hook.hooks if type(hook) is SequentialHook else (hook,)


def _restore_forward(module: nn.Module) -> None:
    attributes = vars(module)
    hooked, old = attributes.pop("_hooked_forward"), attributes.pop("_old_forward")
    del attributes["_hf_hook"]
    if attributes.get("forward") is not hooked:
        hooked.retired = old  # another wrapper may still call it
    # The class's method needs no entry in the instance.
    elif isinstance(old, WeakForward) and old.bound.__func__ is getattr(type(module), "forward", None):
        del attributes["forward"]
    else:
        attributes["forward"] = old.bound if isinstance(old, WeakForward) else old
