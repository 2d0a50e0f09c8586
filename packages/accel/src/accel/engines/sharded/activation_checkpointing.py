"""Activation checkpointing: chosen modules recompute their activations in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class CheckpointedForward:
    """A module's forward that saves only its inputs; a class, so that the module still pickles.

    The module is not wrapped: names of parameters and classes stay.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool) -> None:
        self.forward = forward
        self.offload = offload
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, and again in backward."""
        if not self.offload:
            # The reentrant variant takes no keyword arguments, and needs an input that requires a gradient.
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        # Only the inputs are still saved for backward.
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def apply_activation_checkpointing(modules: Iterable[torch.nn.Module], offload: bool) -> None:
    """Checkpoint the activations of modules; idempotent.

    Args:
        modules: The modules.
        offload: Keep the saved inputs on the CPU.
    """
    for module in modules:
        # An instance attribute: the module is not wrapped, and names of parameters stay.
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            module.forward = CheckpointedForward(module.forward, offload)
