"""Optimizers that step during the backward pass (LOMO), so that all gradients never exist at the same time.

They are recognised by their method `fused_backward(loss, lr)`: the library itself (`lomo-optim`) is never
imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accel_state.logging.warning import warn


def steps_in_backward(optimizer: Any) -> bool:
    """Return whether an optimizer steps in its `fused_backward`, and not in `step`."""
    return callable(getattr(optimizer, "fused_backward", None))


def find_lomo(optimizers: Iterable[Any]) -> Any | None:
    """Find the optimizer that steps in backward.

    Args:
        optimizers: Optimizers, wrapped or not.

    Returns:
        It, or None.

    Raises:
        ValueError: If there are several: one backward pass would step them all.
    """
    found = [optimizer for optimizer in optimizers if steps_in_backward(optimizer)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} optimizers that step during the backward pass (LOMO) are prepared, and a backward "
            "pass would step all of them. Pass their models' parameters to one."
        )
    return found[0] if found else None


def check_lomo(optimizer: Any, *, num_processes: int, has_scaler: bool) -> None:
    """Raise if an optimizer steps in backward in a run where that is wrong.

    Args:
        optimizer: Any optimizer; others pass.
        num_processes: Number of processes whose gradients are averaged.
        has_scaler: Whether losses are scaled for fp16.

    Raises:
        ValueError: If gradients must be averaged or unscaled between backward and step.
    """
    if not steps_in_backward(optimizer):
        return
    name = type(optimizer).__name__
    if num_processes > 1:
        raise ValueError(
            f"{name} steps during the backward pass, before the gradients of {num_processes} processes are "
            "averaged, so that their models would drift apart. Train on one process, or choose another "
            "optimizer."
        )
    if has_scaler:
        raise ValueError(
            f"{name} steps during the backward pass, before fp16 gradients can be unscaled and checked. "
            "Use mixed_precision='bf16' or 'no'."
        )


def lomo_backward(optimizer: Any | None, loss: torch.Tensor, learning_rate: float, num_steps: int) -> None:
    """Run the backward pass, and with it the step, of an optimizer that steps in backward.

    Args:
        optimizer: What `find_lomo` found.
        loss: The loss, not scaled for accumulation.
        learning_rate: The learning rate of this step.
        num_steps: Micro-batches per optimizer step.

    Raises:
        ValueError: If there is no such optimizer, or gradients would be accumulated.
    """
    if optimizer is None:
        raise ValueError(
            "No prepared optimizer steps during the backward pass. Pass a Lomo or AdaLomo of lomo-optim to "
            "prepare() first, or leave out learning_rate."
        )
    # fused_backward steps at once, so a window's gradients cannot be accumulated.
    if num_steps > 1:
        raise ValueError(
            "An optimizer that steps during the backward pass (LOMO) accumulates no gradients, and "
            f"gradient_accumulation_steps is {num_steps}. Set it to 1 and make the batches larger."
        )
    optimizer.fused_backward(loss, learning_rate)


def warn_about_clipping(optimizer: Any) -> None:
    """Warn that the gradients of an optimizer that steps in backward cannot be clipped.

    Args:
        optimizer: What `find_lomo` found.
    """
    # The user's optimizer, below the wrapper.
    name = type(getattr(optimizer, "optimizer", optimizer)).__name__
    warn(
        f"Clipping is ignored: {name} steps during the backward pass, which leaves no gradients to clip. Use "
        "the optimizer's own clipping (clip_grad_norm= or clip_grad_value= where it is made).",
    )
