from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import torch

from accel_ops.trees.convert import convert_outputs_to_fp32, convert_to_fp32


def forward(x: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
    """Halve the precision."""
    return {"logits": (x * scale).half(), "other": (x.bfloat16(), x.double(), "text")}


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return half precision."""
        return x.half()


class Decorated:
    @convert_outputs_to_fp32
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.half()


def test_convert_to_fp32() -> None:
    ints = torch.ones(1, dtype=torch.int32)
    data = {"a": torch.ones(1).half(), "b": [torch.ones(1).bfloat16(), ints], "c": torch.ones(1).double()}

    result = convert_to_fp32(data)

    assert result["a"].dtype == result["b"][0].dtype == torch.float32
    assert result["b"][1] is ints
    assert result["c"] is data["c"]


def test_the_wrapper_converts_and_looks_like_the_function() -> None:
    wrapped = convert_outputs_to_fp32(forward)

    result = wrapped(torch.ones(1), scale=3.0)

    assert result["logits"].dtype == torch.float32
    assert result["logits"].item() == 3
    assert [getattr(x, "dtype", x) for x in result["other"]] == [torch.float32, torch.float64, "text"]
    assert inspect.signature(wrapped) == inspect.signature(forward)
    assert wrapped.__doc__ == forward.__doc__
    assert wrapped.__name__ == "forward"


def test_the_wrapper_can_be_taken_off() -> None:
    wrapped = convert_outputs_to_fp32(forward)

    assert inspect.unwrap(wrapped) is forward


def test_the_wrapper_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(convert_outputs_to_fp32(forward)))

    assert again(torch.ones(1))["logits"].dtype == torch.float32
    assert inspect.unwrap(again) is forward


def test_on_a_model() -> None:
    model = Model()
    model.forward = MethodType(convert_outputs_to_fp32(Model.forward), model)  # type: ignore[method-assign]

    assert model(torch.ones(1)).dtype == torch.float32
    assert copy.deepcopy(model)(torch.ones(1)).dtype == torch.float32
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    assert pickle.loads(pickle.dumps(model))(torch.ones(1)).shape == (1,)


def test_as_a_decorator_of_a_method() -> None:
    assert Decorated()(torch.ones(1)).dtype == torch.float32
