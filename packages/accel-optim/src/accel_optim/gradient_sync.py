"""What a prepared optimizer needs of an engine: the tensors that it steps, with complete gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from accel_optim.parameter_map import ParameterMap


class GradientSync(Protocol):
    """An engine, as prepared optimizers see it."""

    parameters: ParameterMap
    """What trains in the place of each parameter."""

    def reduce_accumulated(self) -> None:
        """Reduce gradients that are not reduced yet, before they are read, clipped or used by a step."""

    def drop_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> bool:
        """Drop unreduced gradients that are kept outside of `.grad`.

        Args:
            parameters: The trained tensors; by default all.

        Returns:
            Whether there were any.
        """
