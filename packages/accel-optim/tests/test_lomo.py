"""What optimizers that step in backward need; the real library trains in tests-integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_optim.lomo import check_lomo, find_lomo, lomo_backward, steps_in_backward
from accel_optim.optimizer import AcceleratedOptimizer

pytestmark = pytest.mark.usefixtures("fresh_state")


class StepsInBackward(torch.optim.Optimizer):
    """Gradient descent inside the backward pass; like LOMO it has no step()."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.5})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=lr)
                parameter.grad = None


def make() -> tuple[nn.Linear, StepsInBackward]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, StepsInBackward(model)


def test_it_is_known_by_its_backward() -> None:
    model, optimizer = make()
    plain = torch.optim.SGD(model.parameters())
    wrapped = AcceleratedOptimizer(optimizer)

    assert steps_in_backward(optimizer)
    assert steps_in_backward(wrapped)
    assert not steps_in_backward(plain)
    assert find_lomo([plain]) is None
    assert find_lomo([plain, wrapped]) is wrapped


def test_backward_steps_and_step_does_nothing_more() -> None:
    model, optimizer = make()
    wrapped = AcceleratedOptimizer(optimizer)
    lomo_backward(wrapped, model(torch.ones(1, 1)).sum(), 0.25, num_steps=1)

    assert wrapped.step() is None
    wrapped.zero_grad()
    assert model.weight.item() == 0.75
    assert not wrapped.step_was_skipped


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"num_processes": 2, "has_scaler": False}, "before the gradients of 2 processes are averaged"),
        ({"num_processes": 1, "has_scaler": True}, "Use mixed_precision='bf16' or 'no'"),
    ],
)
def test_where_its_steps_would_be_wrong_it_is_rejected(where: Any, message: str) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match=f"StepsInBackward steps during .*{message}"):
        check_lomo(optimizer, **where)
    check_lomo(torch.optim.SGD(model.parameters()), **where)
    check_lomo(optimizer, num_processes=1, has_scaler=False)


def test_two_of_them_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 optimizers that step during the backward pass"):
        find_lomo([make()[1], make()[1]])


def test_backward_without_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"Pass a Lomo or AdaLomo of lomo-optim to prepare\(\) first"):
        lomo_backward(None, torch.ones(()), 0.1, num_steps=1)


def test_accumulation_is_rejected() -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 4\. Set it to 1"):
        lomo_backward(optimizer, model(torch.ones(1, 1)).sum(), 0.25, num_steps=4)
    assert model.weight.item() == 1
