"""Modules inside modules: removing wrappers, and inspecting a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref

import torch

from accel_ops.signatures import signature

# Containers that keep the model in `.module`. A model can only be in one whose module is loaded.
_CONTAINERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
)

# Of torch.distributed.fsdp; `fully_shard` derives a model's class from the second.
_SHARDED_CLASSES = ("FullyShardedDataParallel", "FSDPModule")


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Take a model out of the containers of parallel training (DDP, DataParallel, FSDP, DeepSpeed).

    The containers stay unchanged: training through them still works.

    Args:
        model: The model.
        keep_fp32_wrapper: Keep mixed precision's wrapper of `forward`. Otherwise it is removed, in place.
        keep_torch_compile: If the container was compiled, compile the inner model the same way. Otherwise the
            plain module is returned, also from inside a container, and submodules in the wrapper of
            `torch.compile` are compiled in place instead, as by `torch.nn.Module.compile`, so that names have
            no `_orig_mod`.
        recursive: Also take submodules out of their containers, in place.

    Returns:
        The inner model; `model` itself when nothing wrapped it.
    """
    plain: torch.nn.Module = model._orig_mod if is_compiled_module(model) else model  # type: ignore[assignment]
    inner = _unwrap_containers(plain)
    if recursive:
        _unwrap_children(inner)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if not keep_torch_compile:
        inner = inner._orig_mod if is_compiled_module(inner) else inner  # type: ignore[assignment]
        if isinstance(inner, torch.nn.Module):  # and not how a sharded model is loaded
            compile_children_in_place(inner)
        return inner
    if plain is model:
        return inner
    # The same class and context wrap the inner model; the compiled container keeps its own.
    return model if inner is plain else type(model)(inner, model.dynamo_ctx)


def _unwrap_containers(model: torch.nn.Module) -> torch.nn.Module:
    kinds = tuple(
        getattr(sys.modules[module], name)
        for module, name in _CONTAINERS
        if hasattr(sys.modules.get(module), name)
    )
    # Containers may be nested, as DDP around a compiled model of another library.
    while isinstance(model, kinds):
        model = model.module
    return model


def compile_children_in_place(model: torch.nn.Module) -> None:
    """Compile submodules in place that are in the wrapper of `torch.compile`, which has `_orig_mod` in names.

    Args:
        model: The model; it stays the same object, and is not compiled itself.
    """
    if "torch._dynamo" not in sys.modules:  # without it nothing can be compiled
        return
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            is_wrapper = child is not None and is_compiled_module(child)
            # A wrapper whose forward was replaced, as by a hook of accel's, runs that, and stays.
            is_torchs = is_wrapper and hasattr(vars(child).get("forward"), "_torchdynamo_orig_callable")
            if is_torchs and not is_compiled_module(parent):
                parent._modules[name] = _compiled_in_place(child)


def _compiled_in_place(compiled: Any) -> torch.nn.Module:
    module: Any = compiled._orig_mod
    # Hooks that were registered on the wrapper would be lost with it.
    for table, hooks in vars(compiled).items():
        if "_hooks" in table and isinstance(hooks, dict):
            vars(module)[table].update(hooks)
    if module._compiled_call_impl is None:
        call, dynamo = module._call_impl, sys.modules["torch._dynamo"]
        # As torch's wrapper does it (2.13): torch's own modules are traced inside another function alone.
        if isinstance(module.forward, MethodType) and dynamo.trace_rules.check(module.forward):
            call = dynamo.external_utils.wrap_inline(call)
        # A private of torch, which `torch.nn.Module.compile` sets too; the options are those of the wrapper.
        module._compiled_call_impl = compiled.dynamo_ctx(call)
    inner: torch.nn.Module = module
    return inner


def _unwrap_children(model: torch.nn.Module) -> None:
    for name, child in model.named_children():
        unwrapped = _unwrap_containers(child)
        if unwrapped is not child:
            setattr(model, name, unwrapped)
        _unwrap_children(unwrapped)


class WeakForward:
    """A module's forward method with a weak reference to the module, for use by the module itself.

    A bound method stored in its own module is a reference cycle: only the garbage collector would free the
    module's memory.

    Args:
        method: The bound method.
    """

    def __init__(self, method: MethodType) -> None:
        self.__setstate__(method)

    @property
    def bound(self) -> MethodType:
        """The bound method.

        Raises:
            ReferenceError: If the module is gone.
        """
        module = self._module()
        if module is None:
            raise ReferenceError(
                f"the module of {self._function.__qualname__} has been freed: keep the module, and not its "
                "forward alone."
            )
        return MethodType(self._function, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        module = self._module()  # and not `bound`: this is called in every step
        return self._function(module, *args, **kwargs) if module is not None else self.bound()

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return signature(self.bound)
        return getattr(self.bound, name)

    def __getstate__(self) -> MethodType:
        return self.bound

    def __setstate__(self, method: MethodType) -> None:
        self._function: Callable[..., Any] = method.__func__
        self._module = ref(method.__self__)


def weak_forward(forward: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """Return a forward that its module can store: without a reference cycle if it is the module's method.

    Args:
        forward: Any function.
        module: The module.
    """
    is_module_method = isinstance(forward, MethodType) and forward.__self__ is module
    return WeakForward(forward) if is_module_method else forward  # type: ignore[arg-type]


def _restore_forward(model: torch.nn.Module) -> None:
    # Where mixed precision keeps the forward that it replaced; the name is documented.
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    if isinstance(original, WeakForward):
        original = original.bound
    if original == MethodType(type(model).forward, model):
        # The class's own method shows again.
        del model.forward
    else:
        model.forward = original


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` returned this module.

    Args:
        module: The module.
    """
    # A module can only be compiled where dynamo is loaded.
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether the module or one inside it was compiled, by `torch.compile` or in place.

    Args:
        module: The module.
    """
    # torch.nn.Module.compile leaves this attribute, and torch has no public way to ask (2.13).
    return any(
        is_compiled_module(child) or child._compiled_call_impl is not None for child in module.modules()
    )


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether any parameter is a `torch.distributed.tensor.DTensor`.

    Args:
        model: The model.
    """
    # Not imported to ask: a model without DTensors may be in a program that never loads them.
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(p, tensor.DTensor) for p in model.parameters())


def model_is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP, of either version, has sharded a model or a submodule.

    Args:
        model: The model.
    """
    # A model can only be sharded by a module of torch that is loaded.
    library = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(library, name) for name in _SHARDED_CLASSES) if library is not None else ()
    return any(isinstance(module, kinds) for module in model.modules())


def unsaved_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in its state dict.

    Args:
        module: The module; those inside it do not count.
    """
    # A private of torch.nn.Module (2.13), which has no public list of them.
    return module._non_persistent_buffers_set


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute.

    Args:
        obj: Where to begin.
        attr: Names with dots between, as "layers.0.weight".

    Raises:
        AttributeError: If one of them is not there.
    """
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: bool = False
) -> list[torch.nn.Module] | list[tuple[str, torch.nn.Module]]:
    """List a model's modules so that each comes after the ones inside it.

    Args:
        model: The model, which comes last.
        return_fqns: Pair each module with its full name; the model's own is "".

    Returns:
        Every module once, a shared one under its first name.
    """
    names: dict[torch.nn.Module, str] = {}
    for name, module in _bottom_up(model, ""):
        # A module that is used twice is one module, for those who shard or freeze it.
        names.setdefault(module, name)
    return [(name, module) for module, name in names.items()] if return_fqns else list(names)


def _bottom_up(module: torch.nn.Module, name: str) -> list[tuple[str, torch.nn.Module]]:
    below = [
        pair
        for child_name, child in module.named_children()
        for pair in _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    ]
    return [*below, (name, module)]


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class, or of the class of any other object.

    Args:
        obj: The object.
    """
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)
