"""The gradients of an accumulation window that is open when a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_ops.modules import extract_model_from_parallel


def get_gradients(models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Read the gradients that this process has gathered.

    Args:
        models: The models, prepared or not.

    Returns:
        Gradients by "<index of the model>.<name of the parameter>"; the tensors themselves.

    Raises:
        ValueError: If a gradient is sharded or sparse; it names the parameter.
    """
    found = {}
    for name, parameter in _parameters(models).items():
        gradient = parameter.grad
        if gradient is None:
            continue
        # Exact type: a DTensor is a subclass, and has this process's part alone.
        if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
            raise ValueError(
                f"The gradient of {name} is a {type(gradient).__name__} of layout {gradient.layout}, which "
                "cannot be saved in the middle of an accumulation window. Save where accelerator."
                "sync_gradients is True, after the optimizer's step."
            )
        found[name] = gradient
    return found


def different_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, Any]) -> list[str]:
    """Return the names of gradients that are of no parameter of the models, or have another shape.

    Args:
        models: The models, prepared or not.
        gradients: What `get_gradients` returned.
    """
    parameters = _parameters(models)
    return sorted(
        name
        for name, value in gradients.items()
        if name not in parameters or parameters[name].shape != value.shape
    )


def set_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, Any]) -> None:
    """Give parameters the gradients that were read before; other parameters have none.

    Args:
        models: The models, prepared or not.
        gradients: What `get_gradients` returned, of these models' parameters.
    """
    for name, parameter in _parameters(models).items():
        if name in gradients:
            saved = gradients[name].to(device=parameter.device, dtype=parameter.dtype)
            # A copy with memory of its own: the file may be mapped.
            parameter.grad = saved.clone()
        # Gradients of the window that was open here before the load would otherwise be added to.
        else:
            parameter.grad = None


def _parameters(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{index}.{name}": parameter
        for index, model in enumerate(models)
        for name, parameter in extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
    }
