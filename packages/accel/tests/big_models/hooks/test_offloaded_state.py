"""The state dicts of one module whose weights are kept elsewhere."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from accel.big_models.hooks.offloaded_state import keep_state


@dataclass(frozen=True)
class Kept:
    """A weight that is kept elsewhere."""

    name: str
    placeholder: torch.Tensor


def value(slot: Kept) -> torch.Tensor:
    return torch.full(slot.placeholder.shape, 3.0, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def layer() -> nn.Linear:
    """A layer whose weight is elsewhere, and whose bias is there."""
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(layer.weight.detach().to("meta"))
    return layer


def test_what_is_elsewhere_is_in_the_state_dict_in_the_dtype_of_the_model(layer: nn.Linear) -> None:
    keep_state(layer, [Kept("weight", layer.weight)], value)
    state = nn.Sequential(layer).state_dict(prefix="model.")

    assert list(state) == ["model.0.weight", "model.0.bias"]
    weight = state["model.0.weight"]
    assert weight.tolist() == [[3, 3], [3, 3]]
    assert (weight.dtype, weight.requires_grad) == (torch.float32, False)
    assert torch.equal(state["model.0.bias"], layer.bias)


def test_what_is_there_is_not_replaced(layer: nn.Linear) -> None:
    keep_state(layer, [Kept("weight", layer.weight), Kept("bias", layer.bias)], value)

    assert torch.equal(layer.state_dict()["bias"], layer.bias)


def test_loading_what_is_elsewhere_is_an_error_and_the_rest_loads(layer: nn.Linear) -> None:
    keep_state(layer, [Kept("weight", layer.weight)], value)
    with pytest.raises(RuntimeError, match=r"cannot load 0\.weight: offloaded weights are not in the model"):
        nn.Sequential(layer).load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    layer.load_state_dict({"bias": torch.ones(2)}, strict=False)

    assert layer.bias.tolist() == [1, 1]


def test_handles_undo_it(layer: nn.Linear) -> None:
    for handle in keep_state(layer, [Kept("weight", layer.weight)], value):
        handle.remove()

    assert layer.state_dict()["weight"].is_meta
    assert not layer._state_dict_hooks
    assert not layer._load_state_dict_pre_hooks


def test_a_module_with_it_is_copied_and_pickled(layer: nn.Linear) -> None:
    keep_state(layer, [Kept("weight", layer.weight)], value)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.state_dict()["weight"].tolist() == [[3, 3], [3, 3]]
