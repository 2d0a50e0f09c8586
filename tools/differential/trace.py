"""What a run shows of itself, and how two runs are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Refusal", "Trace", "difference"]


@dataclass(frozen=True)
class Refusal:
    """An action that accel rejected with its own error.

    Attributes:
        at: The micro-batch before which it was.
        action: What was rejected.
        error: The error's type and text.
    """

    at: int
    action: str
    error: str


@dataclass
class Trace:
    """What one rank saw: labelled values in their order, and what was rejected.

    Attributes:
        values: Numbers, lists of sample numbers, or weights by name.
        refusals: In their order.
        ended: Why the program ended early, if it did: an error of accel's inside a micro-batch.
    """

    values: list[tuple[str, Any]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    ended: str | None = None

    def add(self, label: str, value: Any) -> None:
        """Note a value."""
        self.values.append((label, value))


def difference(trace: Trace, expected: Trace, tolerance: float) -> str | None:
    """The first difference between two runs; None where they agree.

    Args:
        trace: What an engine gave.
        expected: What plain PyTorch gave.
        tolerance: The largest relative error (absolute below 1).
    """
    for (label, value), (wanted_label, wanted) in zip(trace.values, expected.values, strict=False):
        if label != wanted_label:
            return f"{label} came where {wanted_label} was expected"
        if found := _unlike(value, wanted, tolerance):
            return f"{label}: {found}"
    if trace.ended is None and len(trace.values) != len(expected.values):
        return f"{len(trace.values)} values, expected {len(expected.values)}"
    return None


def _unlike(value: Any, wanted: Any, tolerance: float) -> str | None:
    if isinstance(wanted, dict):
        if value is None:
            return None  # this rank has no state dict
        if list(value) != list(wanted):
            return f"names {sorted(set(value) ^ set(wanted))} are on only one side"
        texts = {name: _unlike(value[name], wanted[name], tolerance) for name in wanted}
        return next((f"{name}: {text}" for name, text in texts.items() if text), None)
    if isinstance(wanted, torch.Tensor):
        if value.shape != wanted.shape:
            return f"shape {tuple(value.shape)}, expected {tuple(wanted.shape)}"
        error = (value.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
        limit = tolerance * max(1.0, wanted.double().abs().max().item()) if wanted.numel() else 0.0
        return f"off by {error:.3g}" if not error <= limit else None
    if isinstance(wanted, float):
        both_nan = math.isnan(value) and math.isnan(wanted)
        if both_nan or math.isclose(value, wanted, rel_tol=tolerance, abs_tol=tolerance):
            return None
    return None if value == wanted else f"{value!r}, expected {wanted!r}"
