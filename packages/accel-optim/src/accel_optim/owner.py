"""The owner of parameters and gradients that an optimizer steps: the interface of engines and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class ParameterOwner:
    """Parameters and their gradients are where the user sees them. Engines override what differs.

    An engine may keep a parameter in another tensor than the one that a user holds (a shard), and gradients
    outside of `.grad` until the accumulation window ends. The prepared optimizer asks its engine's owner
    where it meets either.
    """

    # Class attributes, as most owners never hold anything back, and those of one process have nothing to do.
    holds_back = False
    """Whether gradients are kept outside of `.grad` now."""

    acts = False
    """Whether `after_backward`, `finish_window` and `before_step` are called; those of subclasses are."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.acts = True  # whatever they override

    def present(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that is stepped for a parameter that a user may hold."""
        return parameter

    def present_all(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are stepped for a new group of parameters; there may be fewer."""
        return [self.present(parameter) for parameter in parameters]

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note what optimizers step, now or newly; every process calls it with the same parameters."""

    def averages(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a parameter of no model is averaged over processes here."""
        return False

    def after_backward(self, retains_graph: bool) -> None:
        """Note a backward pass.

        Args:
            retains_graph: Whether it kept its graph for another one.
        """

    def finish_window(self) -> None:
        """Reduce gradients that are still held back, before they are read, clipped, or stepped with."""

    def before_step(self, param_groups: list[dict[str, Any]]) -> None:
        """Get ready for a step, which changes parameters; called at the window's boundary alone.

        Args:
            param_groups: Those of the optimizer that steps.
        """
        # Before a step as a rule: an optimizer must never see half of a window's gradients.
        self.finish_window()

    def show_present(self) -> None:
        """Let modules show the tensors that are stepped, before something else than a step changes these."""

    def forget_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Drop the gradients of parameters that are kept outside of `.grad`.

        Args:
            parameters: The tensors that are stepped; by default all.
        """
