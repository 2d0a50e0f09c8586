"""Backward passes that are differentiated again, which engines that gather in backward cannot do."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from accel_ops.trees.walk import flatten


def refuse_create_graph(model: torch.nn.Module, engine: str) -> None:
    """Have a backward pass through a model with `create_graph=True` raise an error; on all processes.

    Args:
        model: The model.
        engine: What the engine is called.
    """
    model.register_forward_hook(partial(_after_forward, engine))


def _after_forward(engine: str, model: Any, inputs: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for item in flatten(output)[0]:
            if isinstance(item, torch.Tensor) and item.requires_grad:
                item.register_hook(partial(_refuse, engine))  # type: ignore[no-untyped-call]


def _refuse(engine: str, gradient: torch.Tensor) -> None:
    # torch enables gradients in a backward pass that is recorded.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{engine}: a backward pass with create_graph=True, as for a gradient penalty. Its own backward "
            "pass would need whole weights and reduced gradients again, which are gone by then. Train with "
            "DDP or on one process; or replace the second derivative by a difference of two forward passes."
        )
