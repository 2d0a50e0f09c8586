"""Rejecting `create_graph=True`, which engines that gather in backward do not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from accel_ops.trees.walk import flatten


def reject_create_graph(modules: Iterable[torch.nn.Module], engine: str) -> None:
    """Make a backward pass with `create_graph=True` through modules raise an error, on all processes.

    Args:
        modules: The model, and modules in it whose weights are gathered or split: such a pass may begin
            inside the model's forward (forces as the gradient of an energy), or at an output of any class.
        engine: The name of the engine.
    """
    after_forward = partial(_after_forward, partial(_reject, engine))
    for module in dict.fromkeys(modules):
        module.register_forward_hook(after_forward)


def _after_forward(reject: Callable[[torch.Tensor], None], model: Any, inputs: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # This runs after every split layer, nearly all of which return one tensor.
        for item in (output,) if type(output) is torch.Tensor else flatten(output)[0]:
            if isinstance(item, torch.Tensor) and item.requires_grad:
                item.register_hook(reject)  # type: ignore[no-untyped-call]


def _reject(engine: str, gradient: torch.Tensor) -> None:
    # torch enables gradients in a backward pass with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{engine}: a backward pass with create_graph=True, as for a gradient penalty. Its own backward "
            "pass would need full weights and unreduced gradients again, which are freed by then. Train with "
            "DDP or on one process; or replace the second derivative by a difference of two forward passes."
        )
