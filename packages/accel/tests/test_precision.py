"""The precision wrapper of a forward."""

from __future__ import annotations

import inspect

import torch

from accel.precision import Precision, wrap_forward
from accel_optim.handlers import AutocastKwargs


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Scale and project."""
        return {"out": self.linear(x) * scale, "count": torch.tensor(1)}


def test_wrapping_keeps_the_signature_and_converts_only_half_outputs():
    model = Model()
    wrap_forward(model, Precision("bf16"), "cpu")

    result = model(torch.ones(1, 2), scale=2.0)

    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert model.forward.__doc__ == "Scale and project."
    assert result["out"].dtype is torch.float32
    assert result["count"].dtype is torch.int64


def test_full_precision_is_not_wrapped_and_twice_is_once():
    model = Model()
    wrap_forward(model, Precision("no"), "cpu")
    assert "forward" not in vars(model)

    wrap_forward(model, Precision("bf16"), "cpu")
    once = model.forward
    wrap_forward(model, Precision("bf16"), "cpu")
    assert model.forward is once


def test_autocast_options_reach_the_forward():
    model = Model()
    expected = model(torch.ones(1, 2))["out"]
    wrap_forward(model, Precision("bf16", AutocastKwargs(enabled=False)), "cpu")

    assert torch.equal(model(torch.ones(1, 2))["out"], expected)
