"""What rejecting `create_graph=True` costs, and that it works for outputs of every kind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from accel.engines.common import create_graph


class Giving(torch.nn.Module):
    def __init__(self, give):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.give = give

    def forward(self, x):
        return self.give(self.layer(x))


@pytest.mark.parametrize("give", [lambda x: x, lambda x: {"loss": [x]}])
def test_backward_with_create_graph_is_rejected(give):
    model = Giving(give)
    create_graph.reject_create_graph([model], "fsdp2")
    output = model(torch.ones(1, 2))
    loss = (output if isinstance(output, torch.Tensor) else output["loss"][0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="fsdp2: a backward pass with create_graph=True"):
        loss.backward(create_graph=True)


def test_a_tensor_is_not_searched_for_tensors():
    model = torch.nn.Linear(2, 1)
    create_graph.reject_create_graph([model], "fsdp2")
    with mock.patch.object(create_graph, "flatten", wraps=create_graph.flatten) as flatten:
        outputs = [model(torch.ones(1, 2)) for _ in range(2)]
    flatten.assert_not_called()
    # One hook for all forward passes.
    first, second = [list(output._backward_hooks.values()) for output in outputs]
    assert first[0] is second[0]
