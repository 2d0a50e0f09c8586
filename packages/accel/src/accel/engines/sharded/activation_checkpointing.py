"""Activation checkpointing of chosen modules: they compute their activations again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class CheckpointedForward:
    """A module's forward that keeps its inputs alone; a class, so that the module still pickles.

    No module wraps the module: names of parameters and classes stay.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool) -> None:
        self.forward = forward
        self.offload = offload
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, to be run again in backward."""
        if not self.offload:
            # The reentrant kind takes no keyword arguments, and needs an input that requires a gradient.
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        # What is still saved for backward are the inputs.
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def apply_activation_checkpointing(modules: Iterable[torch.nn.Module], offload: bool) -> None:
    """Checkpoint the activations of modules; idempotent.

    Args:
        modules: The modules.
        offload: Keep what is saved (their inputs) on the CPU.
    """
    for module in modules:
        # The instance's attribute: nothing wraps the module, so that names of parameters stay.
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            module.forward = CheckpointedForward(module.forward, offload)
