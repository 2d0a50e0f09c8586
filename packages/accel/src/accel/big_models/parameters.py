"""Copies of parameters and buffers on other devices that stay what they are: their class and attributes."""

from __future__ import annotations

import torch

from accel_ops.module_tensors import moved

__all__ = ["META", "move", "on_meta"]

META = torch.device("meta")


def move(value: torch.Tensor, own: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return a weight on a device, in the dtype and of the class that it has in the model.

    Args:
        value: The weight, wherever it is kept.
        own: What the model has in its place.
        device: Where to; None for where it is.

    Returns:
        `value` itself, if nothing about it has to change.
    """
    device = value.device if device is None else device
    there = value.device == device and value.dtype == own.dtype
    if not isinstance(own, torch.nn.Parameter):
        return value.detach() if there else moved(own, value, device)
    if isinstance(value, torch.nn.Parameter) and type(value) is type(own):
        if there:
            if value.requires_grad != own.requires_grad:
                value.requires_grad_(own.requires_grad)
            return value
        if type(value).to is not torch.Tensor.to:  # it is quantized already, and knows how to move
            return value.to(device)
    return moved(own, value, device)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return what stands for a parameter or buffer whose values are elsewhere.

    Args:
        tensor: The parameter or buffer.

    Returns:
        One of its class on the meta device; itself, if it is there.
    """
    return moved(tensor, None, META)
