"""Functions of torch that `accel verify --without_dropout` calls without their dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from accel.observe.verify.patches import replace_function, switch_off


@pytest.fixture
def without_dropout() -> Iterator[None]:
    undo = [
        replace_function(functional, "dropout", switch_off("p", 1)),
        replace_function(functional, "scaled_dot_product_attention", switch_off("dropout_p", 4)),
    ]
    yield
    for function in undo:
        function()


def attention(p: float, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(4, 2, dropout=p)
    return lambda x: layer(x, x, x, **options)[0]  # type: ignore[no-any-return]


CASES: dict[str, Callable[[float], Callable[[torch.Tensor], torch.Tensor]]] = {
    "by name": lambda p: lambda x: functional.dropout(x, p=p),
    "by position": lambda p: lambda x: functional.dropout(x, p),
    "module": lambda p: torch.nn.Dropout(p),
    "fused attention": lambda p: lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=p),
    "fused attention, by position": lambda p: (
        lambda x: functional.scaled_dot_product_attention(x, x, x, None, p)
    ),
    "attention layer": lambda p: attention(p),
    "fused attention layer": lambda p: attention(p, need_weights=False),
}


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_off(name: str, without_dropout: None):
    x = torch.arange(24.0).reshape(2, 3, 4)

    torch.testing.assert_close(CASES[name](0.9)(x), CASES[name](0.0)(x), rtol=0, atol=0)


@pytest.mark.usefixtures("without_dropout")
def test_the_default_probability_is_replaced():
    assert torch.equal(functional.dropout(torch.ones(99)), torch.ones(99))
