"""The layers of a model: their names, sizes, and which share tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.big_models.placement.layers import make_layout
from accel_state.enums import CustomDtype


class Block(nn.Module):
    """Two layers, and a weight and a buffer of its own: 24 and 12 bytes, and 8 of which 4 are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(1))
        self.register_buffer("nothing", None)
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 1)


class Net(nn.Module):
    """Two blocks with a layer without tensors between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = Block(), nn.ReLU(), Block()


def names(model: nn.Module, **options: object) -> list[tuple[str, ...]]:
    return [layer.names for layer in make_layout(model, **options).layers]


def test_modules_without_children_and_own_tensors_are_layers_in_order():
    layout = make_layout(Net())

    assert [(layer.names, layer.size, layer.buffers) for layer in layout.layers] == [
        (("first.scale", "first.table"), 8, 4),
        (("first.up",), 24, 0),
        (("first.down",), 12, 0),
        (("act",), 0, 0),
        (("second.scale", "second.table"), 8, 4),
        (("second.up",), 24, 0),
        (("second.down",), 12, 0),
    ]
    assert list(layout.before) == [0, 8, 32, 44, 44, 52, 76, 88]
    assert all(layer.shared == {} and layer.alone == layer.size for layer in layout.layers)


@pytest.mark.parametrize("kept", ["Block", ["Block"], {"Block", "Other"}])
def test_classes_that_are_not_split_are_layers(kept):
    layout = make_layout(Net(), kept)

    assert [(layer.names, layer.size) for layer in layout.layers] == [
        (("first",), 44),
        (("act",), 0),
        (("second",), 44),
    ]
    assert names(Block(), no_split_module_classes=kept) == [("",)]


def test_a_model_of_one_module_is_a_layer():
    assert names(nn.Linear(2, 2)) == [("",)]


def test_modules_come_before_what_is_in_them_level_by_level():
    spans = list(make_layout(Net()).spans)

    assert spans[0] == (0, 7)
    assert set(spans[1:4]) == {(0, 3), (3, 4), (4, 7)}
    assert len(spans) == 10
    assert all(last - first == 1 for first, last in spans[4:])


def test_dtypes_change_sizes():
    assert [layer.size for layer in make_layout(Net(), dtype="float16").layers] == [4, 12, 6, 0, 4, 12, 6]
    special = {"first.up.weight": CustomDtype.INT4}
    assert make_layout(Net(), special_dtypes=special).layers[1].size == 2 + 8


def test_layers_that_share_tensors_are_tied_also_through_others():
    model = Net()
    model.second.up.weight = model.first.up.weight
    model.second.down.weight = model.first.down.weight
    model.third = nn.Linear(2, 1)
    model.third.weight = model.second.down.weight
    model.third.bias = model.second.up.bias = nn.Parameter(torch.ones(1))
    layout = make_layout(model)
    together = [1, 2, 5, 6, 7]

    assert layout.tied == dict.fromkeys(together, together)
    up = layout.layers[1]
    assert (up.size, list(up.shared.values()), up.alone) == (24, [16], 8)
    assert layout.layers[5].shared.keys() & up.shared.keys()


def test_a_tensor_that_one_layer_has_twice_counts_once():
    model = nn.Module()
    model.block = Block()
    model.block.down.weight = model.block.up.bias = nn.Parameter(torch.ones(1, 2))
    (layer,) = make_layout(model, "Block").layers

    assert layer.size == 8 + 16 + 8 + 4
    assert layer.shared == {}


def test_a_module_under_two_names_is_one_layer():
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)

    assert names(model) == [("a",)]
