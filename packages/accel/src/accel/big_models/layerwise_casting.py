"""Weights stored in a small dtype, such as float8, and cast for each layer's forward."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.base import Arguments, ModelHook, SequentialHook, add_hook_to_module

# Norms and embeddings are small, or rounding costs more than it saves.
_CAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

WeightPlace = tuple[nn.Module, str]  # a module and the name of a weight directly in it
# The stored tensor, the cast one, and the cast one's version before forward.
Swap = tuple[WeightPlace, torch.Tensor, torch.Tensor, int]


class LayerwiseCastingHook(ModelHook):
    """Keeps the floating-point weights of one module in a storage dtype, and casts them for each forward.

    Stored values are not written after a forward, so they do not change over any number of
    calls. Gradients of inputs and of weights pass through the cast. When the hook is removed, weights get
    their previous dtype back, but not the precision that the storage dtype lost.

    Args:
        storage_dtype: The floating-point dtype of the stored weights, such as `torch.float8_e4m3fn`.
        compute_dtype: Their floating-point dtype in the forward; inputs must have it.
        non_blocking: Cast without waiting for the device, if possible.

    Raises:
        ValueError: If a dtype is not a floating-point dtype.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(
                    f"{name} must be a floating-point dtype of torch, such as torch.bfloat16, not {dtype!r}."
                )
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._dtypes: dict[str, torch.dtype] = {}
        self._calls: list[list[Swap]] = []  # nested if a forward calls its own module

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights of the module, and of those inside of it, to the storage dtype."""
        for name, tensor in _floating(module).items():
            if tensor.dtype != self.storage_dtype:  # else another layer shares it: nothing to undo
                self._dtypes[name] = tensor.dtype
                # The same object with other data, as optimizers and tied modules have it.
                tensor.data = tensor.data.to(self.storage_dtype, non_blocking=self.non_blocking)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Replace the stored weights with weights in the compute dtype."""
        swaps: list[Swap] = []
        for name, tensor in _floating(module).items():
            cast = tensor.to(self.compute_dtype, non_blocking=self.non_blocking)
            swaps.append((_place(module, name), tensor, cast, cast._version))
        # After all casts: if one runs out of memory, nothing is replaced or kept.
        self._calls.append(swaps)
        for place, _, cast, _ in swaps:
            _put(place, cast)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Restore the stored weights; a buffer that the forward has changed is stored again."""
        for _, tensor, cast, version in self._calls[-1]:
            if cast is not tensor and cast._version != version:
                with torch.no_grad():
                    tensor.copy_(cast)
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Restore the stored weights."""
        for place, tensor, _, _ in self._calls.pop():
            _put(place, tensor)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the dtypes that they had before the hook."""
        tensors = _floating(module)
        for name, dtype in self._dtypes.items():
            if name in tensors:
                tensors[name].data = tensors[name].data.to(dtype)
        self._dtypes.clear()
        return module


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, cast for each layer's forward.

    A bfloat16 model takes half the memory in `torch.float8_e4m3fn`, plus one layer in the compute dtype
    while it runs. Embeddings, norms and parameters of other modules stay as they are, and so does a layer
    that shares a weight with one of them, or that its parent reads without calling it (the output projection
    of `nn.MultiheadAttention`). `remove_hook_from_submodules` undoes it.

    Args:
        module: A model, or a single layer.
        storage_dtype: The floating-point dtype of the stored weights.
        compute_dtype: Their dtype in the forward. Run the other layers in it too:
            `model.to(compute_dtype)`.
        skip_modules_pattern: Regular expressions, searched in the dotted name of a module: matching
            modules and all inside of them are left as they are. By default none.
        skip_modules_classes: Classes of modules that are left as they are, with all inside of them. By
            default none.
        non_blocking: Cast without waiting for the device, if possible.

    Raises:
        ValueError: If a dtype is not a floating-point dtype, or a layer has such a hook already.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).bfloat16()
        >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16)
        >>> model[0].weight.dtype, model[1].weight.dtype
        (torch.float8_e4m3fn, torch.bfloat16)
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern
    layers = _layers(module, patterns or (), skip_modules_classes or ())
    chosen = {id(child) for layer in layers.values() for child in layer.modules()}
    others = {
        id(tensor)
        for child in module.modules()
        if id(child) not in chosen
        for tensor in (*child._parameters.values(), *child._buffers.values())
    }
    hooks = []
    for name, layer in layers.items():
        _check_no_hook(layer, name)
        if others.isdisjoint(id(tensor) for tensor in _floating(layer).values()):
            hooks.append((layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)))
    for layer, hook in hooks:
        add_hook_to_module(layer, hook, append=True)


def _layers(
    module: nn.Module, patterns: tuple[str, ...], classes: tuple[type[nn.Module], ...]
) -> dict[str, nn.Module]:
    """Find the layers to cast, by name."""
    found: dict[str, nn.Module] = {}
    passed: set[str] = set()  # modules that are skipped or found, with all inside of them
    for name, child in module.named_modules():
        inside = name != "" and name.rpartition(".")[0] in passed
        skipped = isinstance(child, classes) or any(re.search(pattern, name) for pattern in patterns)
        if inside or skipped or isinstance(child, _CAST):
            passed.add(name)
            if not inside and not skipped and _casts(child):
                found[name] = child
    return found


def _casts(layer: nn.Module) -> bool:
    # nn.MultiheadAttention reads the weight of a layer of this class without calling its forward.
    read_by_parent = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    weight: Any = layer.weight
    return not read_by_parent and weight.is_floating_point()


def _check_no_hook(layer: nn.Module, name: str) -> None:
    hook = vars(layer).get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    if any(isinstance(item, LayerwiseCastingHook) for item in hooks):
        raise ValueError(
            f"{name or type(layer).__name__} already has a hook for layer-wise casting. Remove it first: "
            "remove_hook_from_submodules(model)."
        )


def _floating(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating-point parameters and buffers of a module by name, tied ones under each."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _place(module: nn.Module, name: str) -> WeightPlace:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _put(place: WeightPlace, tensor: torch.Tensor) -> None:
    module, leaf = place
    # Assigned past nn.Module.__setattr__, which only takes parameters: a cast one is not an autograd leaf.
    table: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
    table[leaf] = tensor
