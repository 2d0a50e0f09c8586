"""MS-AMP, which wraps a model together with its optimizer and keeps weights and optimizer states in fp8."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from accel_state.imports.packages import install_hint

__all__ = ["initialize", "library"]


def library() -> Any:
    """Import MS-AMP.

    Raises:
        ImportError: If it is not there; the message names where to get it.
    """
    try:
        return import_module("msamp")
    except ImportError as error:
        raise ImportError(
            f"MS-AMP cannot be imported ({error}). It is not on the package index: build it from "
            "https://github.com/Azure/MS-AMP (NVIDIA GPUs), or train with torchao: "
            f"kwargs_handlers=[AORecipeKwargs()] and {install_hint('fp8')}."
        ) from error


def initialize(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], opt_level: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Let MS-AMP wrap a model and its optimizer.

    Args:
        models: What one call of prepare got.
        optimizers: The same.
        opt_level: "O1" or "O2".

    Raises:
        ImportError: If MS-AMP is not there.
        ValueError: If it is not one model and one optimizer.
    """
    if len(models) != 1 or len(optimizers) != 1:
        raise ValueError(
            f"MS-AMP wraps one model together with its optimizer; prepare got {len(models)} model(s) and "
            f"{len(optimizers)} optimizer(s). Pass one of each in the same call."
        )
    model, optimizer = library().initialize(models[0], optimizers[0], opt_level=opt_level)
    return model, optimizer
