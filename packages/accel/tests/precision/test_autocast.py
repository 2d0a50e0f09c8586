"""The precision wrapper of a forward."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from accel.precision.autocast import Precision, wrap_forward
from accel_ops.modules import extract_model_from_parallel
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


def test_outputs_may_keep_the_precision_that_computed_them():
    model = Model()
    precision = Precision("bf16", AutocastKwargs(convert_outputs_to_fp32=False))
    wrap_forward(model, precision, "cpu")
    wrap_forward(model, precision, "cpu")

    result = pickle.loads(pickle.dumps(model))(torch.ones(1, 2))
    assert result["out"].dtype is torch.bfloat16
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert model(torch.ones(1, 2))["out"].dtype is torch.float32


def test_an_accelerator_that_converts_outputs_says_so_where_another_did_not():
    model = Model()
    kept = Precision("bf16", AutocastKwargs(convert_outputs_to_fp32=False))
    wrap_forward(model, kept, "cpu")
    with pytest.warns(UserWarning, match="prepared by another Accelerator"):
        wrap_forward(model, Precision("bf16"), "cpu")

    assert model(torch.ones(1, 2))["out"].dtype is torch.float32


class Head(torch.nn.Module):
    """A language model's head: few features, many logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@pytest.mark.parametrize(("converts", "itemsize"), [(True, 4), (False, 2)])
def test_logits_take_half_the_memory_where_they_are_not_converted(converts, itemsize):
    model = Head()
    wrap_forward(model, Precision("bf16", AutocastKwargs(convert_outputs_to_fp32=converts)), "cpu")
    logits = model(torch.randn(16, 8))

    assert logits.untyped_storage().nbytes() == 16 * 4096 * itemsize
