"""Copies of parameters and buffers on other devices, with their class and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import prune

from accel_ops.module_tensors import move_tensor

META = torch.device("meta")

# Classes of torch's own hooks that compute a weight before a module's forward, with their replacements.
_COMPUTING = {
    "WeightNorm": "torch.nn.utils.parametrizations.weight_norm",
    "SpectralNorm": "torch.nn.utils.parametrizations.spectral_norm",
}


def move(value: torch.Tensor, current: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return a weight on a device, in the dtype and of the class that it has in the model.

    Args:
        value: The weight, on any device.
        current: The tensor that the model has in its place.
        device: The device; None for the current one.

    Returns:
        `value` itself if nothing has to change.
    """
    device = value.device if device is None else device
    in_place = value.device == device and value.dtype == current.dtype
    if not isinstance(current, torch.nn.Parameter):
        return value.detach() if in_place else move_tensor(current, value, device)
    if isinstance(value, torch.nn.Parameter) and type(value) is type(current):
        if in_place:
            if value.requires_grad != current.requires_grad:
                value.requires_grad_(current.requires_grad)
            return value
        if type(value).to is not torch.Tensor.to:  # already quantized, with its own `to`
            return value.to(device)
    if in_place and type(value) is torch.Tensor and type(current) is torch.nn.Parameter and not vars(current):
        return torch.nn.Parameter(value, current.requires_grad)  # as `move_tensor`, without its checks
    return _drop_stale_statistics(move_tensor(current, value, device))


def bring_to(device: torch.device | None, value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return an offloaded weight for a forward: `move`, but a quantized one is never the stored one itself.

    Layers of bitsandbytes change the weight that they run with and its statistics: some change its layout for
    the CPU, others keep it.

    Args:
        device: The device; None for the current one.
        value: The weight, on any device.
        current: The tensor that the model has in its place.

    Returns:
        The weight.
    """
    quantized = type(value) is type(current) and type(value).to is not torch.Tensor.to
    if not quantized or not isinstance(value, torch.nn.Parameter):
        return move(value, current, device)
    return _drop_stale_statistics(move_tensor(value, value.data, value.device if device is None else device))


def _drop_stale_statistics(weight: torch.Tensor) -> torch.Tensor:
    if getattr(weight, "SCB", weight) is None:
        # An int8 weight of a bitsandbytes layer that has run: the layer has its statistics now.
        weight.CB = None  # type: ignore[attr-defined]
    return weight


def int8_states(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return what bitsandbytes' 8-bit layers keep next to their weights: `CB` is the weight of the last call.

    Args:
        modules: Modules; only such layers that have not run yet count, as later nothing else has it.
    """
    found: list[Any] = []
    for module in modules:
        state, weight = vars(module).get("state"), module._parameters.get("weight")
        if hasattr(state, "CB") and getattr(weight, "SCB", None) is not None:
            found.append(state)
    return found


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for a parameter or buffer whose values are elsewhere.

    Args:
        tensor: The parameter or buffer.

    Returns:
        One of its class on the meta device; itself if it is on it.
    """
    return move_tensor(tensor, None, META)


def check_no_computed_weights(module: torch.nn.Module) -> None:
    """Check that no hook of torch computes a module's weight before its forward, which loads offloaded ones.

    Args:
        module: The module.

    Raises:
        ValueError: If one does: it would compute with memory that has no values.
    """
    for hook in module._forward_pre_hooks.values():
        kind = type(hook)
        pruned = isinstance(hook, prune.BasePruningMethod)
        if pruned or (kind.__module__.startswith("torch.nn.utils.") and kind.__name__ in _COMPUTING):
            fix = "torch.nn.utils.prune.remove(module, name)" if pruned else _COMPUTING[kind.__name__]
            raise ValueError(
                f"{type(module).__name__} has torch's {kind.__name__}, which computes its weight before an "
                f"offloaded one is loaded. Use {fix} before the model is offloaded."
            )
