"""How an optimizer finds the parameters that it steps, and when their gradients are reduced.

This is the interface between engines and prepared optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class GradientSync:
    """Parameters and gradients of one process, unchanged. Engines override what differs.

    An engine may train another tensor than the parameter that the user has (a shard), and keep gradients
    outside of `.grad` until the accumulation window ends. The prepared optimizer then calls this object.
    """

    # Class attributes: most engines keep no gradients elsewhere, and one process has nothing to do.
    has_unreduced_grads = False
    """Whether unreduced gradients are kept outside of `.grad` now."""

    is_active = False
    """Whether `after_backward`, `finish_window` and `before_step` are called; True in subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_active = True  # whatever they override

    def trained_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that the optimizer steps for a parameter of the user's model."""
        return parameter

    def trained_parameters(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the optimizer steps for a new parameter group; there may be fewer."""
        return [self.trained_parameter(parameter) for parameter in parameters]

    def register(self, parameters: Iterable[torch.Tensor]) -> None:
        """Register parameters of optimizers; every process calls it with the same ones."""

    def is_standalone(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter belongs to no prepared model, and its gradient is averaged here."""
        return False

    def after_backward(self, retains_graph: bool) -> None:
        """Record a backward pass.

        Args:
            retains_graph: Whether it ran with `retain_graph=True`.
        """

    def finish_window(self) -> None:
        """Reduce gradients that are not reduced yet, before they are read, clipped or used by a step."""

    def before_step(self, param_groups: list[dict[str, Any]]) -> None:
        """Prepare for an optimizer step; called at the window's boundary only.

        Args:
            param_groups: The groups of the optimizer that steps.
        """
        # An optimizer must never see half of a window's gradients.
        self.finish_window()

    def reshard(self) -> None:
        """Put the trained tensors back into the modules, before something other than a step changes them."""

    def drop_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop gradients that are kept outside of `.grad`.

        Args:
            parameters: The trained tensors; by default all.
        """
