"""Where a model is cut into stages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accel.big_models.pipeline.cut import first_modules
from accel.inference import generate_device_map


class Pair(nn.Module):
    """Two layers of 4 * 4 floats, and a weight next to them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight))
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)


class Net(nn.Module):
    """An embedding that the head shares, and layers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(Pair() for _ in range(layers))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def test_stages_are_of_about_equal_size() -> None:
    assert generate_device_map(Net(), 2) == {
        "embed": 0,
        "layers.0": 0,
        "layers.1": 0,
        "layers.2": 1,
        "layers.3": 1,
        "head": 1,
    }


def test_layers_are_cut_unless_they_are_kept_whole() -> None:
    cut = generate_device_map(Net(1), 3)
    whole = generate_device_map(Net(1), 3, ["Pair"])

    assert cut == {"embed": 0, "layers.0.scale": 0, "layers.0.up": 1, "layers.0.down": 2, "head": 2}
    assert whole == {"embed": 0, "layers.0": 1, "head": 2}
    assert first_modules(cut) == ["layers.0.up", "layers.0.down"]


def test_one_stage_has_all() -> None:
    assert generate_device_map(Net()) == {"": 0}


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.integers(1, 4))
@settings(max_examples=60)
def test_no_other_cut_is_more_even(widths: list[int], stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(width, 1, bias=False) if width else nn.ReLU() for width in widths))
    if stages > len(widths):
        with pytest.raises(ValueError, match=f"cannot be cut into {stages} stages"):
            generate_device_map(model, stages)
        return
    device_map = generate_device_map(model, stages)
    if stages == 1:
        return

    def cost(begins: tuple[int, ...]) -> int:
        ends = (*begins, len(widths))
        return sum(sum(widths[a:b]) ** 2 for a, b in zip((0, *begins), ends, strict=True))

    begins = tuple(int(name) for name in first_modules(device_map))
    assert list(device_map) == [str(place) for place in range(len(widths))]
    assert len(begins) == stages - 1
    assert cost(begins) == min(map(cost, combinations(range(1, len(widths)), stages - 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "num_processes=0"),
        ((9, ["Pair"]), "Net cannot be cut into 9 stages"),
        ((2, None, {0: 100}), "Stage 0 of Net has .* but max_memory allows 100"),
    ],
)
def test_what_cannot_be_cut_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_device_map(Net(), *arguments)
