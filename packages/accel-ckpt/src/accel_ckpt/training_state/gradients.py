"""The gradients of an accumulation window that is open when a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_ops.modules import extract_model_from_parallel


def get_gradients(models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the gradients that this process has accumulated.

    Args:
        models: The models, prepared or not.

    Returns:
        Gradients by "<index of the model>.<name of the parameter>"; not copied.

    Raises:
        ValueError: If a gradient is sharded or sparse; it names the parameter.
    """
    gradients = {}
    for name, parameter in _parameters(models).items():
        gradient = parameter.grad
        if gradient is None:
            continue
        # Exact type: a DTensor is a subclass, and has only this process's shard.
        if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
            raise ValueError(
                f"The gradient of {name} is a {type(gradient).__name__} of layout {gradient.layout}, which "
                "cannot be saved in the middle of an accumulation window. Save where accelerator."
                "sync_gradients is True, after the optimizer's step."
            )
        gradients[name] = gradient
    return gradients


def different_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, Any]) -> list[str]:
    """Return the names of gradients without a parameter of that name and shape in the models.

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
    """Set the gradients of parameters; clear those of other parameters.

    Args:
        models: The models, prepared or not.
        gradients: What `get_gradients` returned, of these models' parameters.
    """
    for name, parameter in _parameters(models).items():
        if name in gradients:
            saved = gradients[name].to(device=parameter.device, dtype=parameter.dtype)
            # A copy with its own memory: the file may be mapped.
            parameter.grad = saved.clone()
        # Otherwise the gradients of the window that was open before the load would be added to.
        else:
            parameter.grad = None


def _parameters(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{index}.{name}": parameter
        for index, model in enumerate(models)
        for name, parameter in extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
    }
