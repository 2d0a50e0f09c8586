"""The weights of a window: what the losses of its micro-batches are sums over, and what divides them.

A loss that is summed over a ragged number of items (the tokens of a batch) counts in proportion to its items.
The gradient of the mean over all items of a window, on all processes, is

    gradient(sum of the losses) / sum of the weights

and the second sum is known only at the window's end. Until then losses are divided by an estimate, the total
of the previous window, so that gradients stay near their final size (fp16 needs that). At the end the
processes sum their weights, once; the accumulated gradients are corrected by estimate / total, and the last
losses are divided by the total itself. Every factor is the same on all processes, so it does not matter at
which micro-batches an engine reduces gradients.

Weights are Python numbers wherever the host has them. On an accelerator they may be device tensors, which the
host never reads.
"""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any, Protocol, TypeAlias

import torch

Weight: TypeAlias = "float | torch.Tensor"


class Gradients(Protocol):
    """The interface of an engine that a weighted window needs."""

    @property
    def divisor(self) -> int:
        """The divisor in reducing over the processes: their number for a mean, 1 for a sum."""

    def total_weight(self, weight: Weight) -> Weight:
        """Sum a weight over the processes; all of them call it, and get the same result."""

    def scale(self, factor: Weight) -> None:
        """Multiply the gradients gathered so far."""


class WindowWeight:
    """The weight of one open window.

    Attributes:
        gathered: The sum over the micro-batches before this one, on this process.
        current: The weight of the current micro-batch; None until it is known.
        total: The sum over the window and all processes; None before the last micro-batch.
        norm: What the losses of the gradients gathered so far were divided by; None without any.
    """

    def __init__(self) -> None:
        self.gathered: Weight = 0.0
        self.current: Weight | None = None
        self.total: Weight | None = None
        self.norm: Weight | None = None
        self._user_weight: Any = None

    def count(self, weight: Any) -> None:
        """Set the weight of the current micro-batch, or check that it is unchanged.

        Args:
            weight: A number, or a tensor of one element.

        Raises:
            TypeError, ValueError: If it is not a weight; see `check_weight`.
            ValueError: If the micro-batch has another weight already.
        """
        if self.current is None:
            # With the object itself: passed again, it need not be read, which may synchronize with an
            # accelerator.
            self.current, self._user_weight = check_weight(weight), weight
        elif weight is not self._user_weight and not bool(self.current == (checked := check_weight(weight))):
            raise ValueError(
                f"backward got weight={float(checked)} in a micro-batch with weight={float(self.current)}. "
                "The weight is that of the micro-batch: give the same one with each of its losses, or add "
                "the losses up. Losses that are means over different numbers of items need an Accelerator "
                "each."
            )

    def next_micro_batch(self) -> None:
        """Add the current micro-batch to the sum, and start the next."""
        if self.current is not None:
            self.gathered = self.gathered + self.current
        self.forget_micro_batch()

    def forget_micro_batch(self) -> None:
        """Drop the current micro-batch."""
        # `gathered` and `norm` stay: they belong to the window.
        self.current = self.total = self._user_weight = None


def check_weight(weight: Any) -> Weight:
    """Return a weight as a number, or as a tensor without dimensions if it is on an accelerator.

    Args:
        weight: A number of at least 0, or a tensor of one element. The values of tensors on an accelerator
            are not read, which would synchronize with it.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is negative, not finite or beyond all floats, or a tensor of several elements.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"backward got a weight of shape {tuple(weight.shape)}; it takes one number: the sum."
            )
        # Its value is not read, to avoid synchronization; a wrong one shows in the gradients.
        if weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = weight.item()
    # Also NumPy's numbers, which are registered as Real.
    if not isinstance(weight, Real):
        raise TypeError(f"backward got weight={weight!r}; it takes a number, or a tensor of one element.")
    try:
        # Python's integers are unbounded, floats are not.
        number = float(weight)
    except OverflowError:
        raise ValueError(
            f"backward got a weight beyond {sys.float_info.max:.1e}, the largest float; it takes how many "
            "items the loss is the sum over."
        ) from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"backward got weight={number}; it takes a number of at least 0: how many items the loss is the "
            "sum over."
        )
    return number


def ratio(numerator: Weight, denominator: Weight) -> Weight:
    """Divide; division by zero gives zero, because a window without weight has no gradient."""
    if isinstance(denominator, torch.Tensor):
        # No branch on the value, which would synchronize.
        return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(denominator))
    return numerator / denominator if denominator > 0 else 0.0


def positive(weight: Weight, otherwise: Weight) -> Weight:
    """Return the weight if it is above zero, else a fallback."""
    if isinstance(weight, torch.Tensor):
        # No `if` on a device tensor, which would synchronize.
        return torch.where(weight > 0, weight, otherwise)
    return weight if weight > 0 else otherwise
