"""Where the layers of a model go, against a search of all maps in order, and from first principles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel
from accel.big_modeling import check_device_map
from accel.big_models.placement import plan as plans
from accel.big_models.placement.layers import make_layout
from accel.utils.modeling import clean_device_map, get_balanced_memory, infer_auto_device_map

unwarned = pytest.mark.filterwarnings("ignore:Layers are offloaded", "ignore:The buffers of offloaded")


def weight(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)


class Block(nn.Module):
    """A module of a class that is not split."""


class Net(nn.Module):
    """64 bytes, 72 bytes of which 40 are buffers, and 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 5)


def build(tree: tuple) -> nn.Module:
    """Build a module from (whether it is not split, sizes of its parameters, its children)."""
    whole, sizes, children = tree
    module = Block() if whole else nn.Module()
    for index, size in enumerate(sizes):
        module.register_parameter(f"p{index}", weight(size))
    for index, child in enumerate(children):
        module.add_module(f"m{index}", build(child))
    return module


leaves = st.tuples(st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=2), st.just([]))
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(
        st.booleans(), st.lists(st.integers(1, 9), max_size=2), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
models = st.lists(trees, min_size=1, max_size=3).map(lambda children: build((False, [], children)))
budgets = st.tuples(st.lists(st.integers(0, 30), max_size=3), st.none() | st.integers(0, 30)).map(
    lambda both: {**dict(enumerate(both[0])), **({} if both[1] is None else {"cpu": both[1]})}
)


def units(model: nn.Module, name: str = "") -> Iterator[list[str]]:
    """List the tensors that stay together, in order: written again, and simpler, for the comparison."""
    children = list(model.named_children())
    if isinstance(model, Block) or not children:
        yield [f"{name}{key}" for key, _ in model.named_parameters(remove_duplicate=False)]
        return
    if model._parameters:
        yield [f"{name}{key}" for key in model._parameters]
    for key, child in children:
        yield from units(child, f"{name}{key}.")


def device_of(name: str, device_map: dict) -> object:
    while name not in device_map:
        assert name, "no device"
        name = name.rpartition(".")[0]
    return device_map[name]


@unwarned
@given(models, budgets)
def test_no_layer_goes_further_than_in_any_map_that_is_allowed(model, budget):
    together = list(units(model))
    sizes = [sum(model.get_parameter(name).nbytes for name in names) for names in together]
    order = [*budget, "disk"]
    device_map = infer_auto_device_map(model, budget, no_split_module_classes=["Block"])

    check_device_map(model, device_map)
    found = []
    for names in together:
        devices = {device_of(name, device_map) for name in names}
        assert len(devices) == 1
        found.append(order.index(devices.pop()))
    possible = [
        choice
        for choice in itertools.combinations_with_replacement(range(len(order)), len(sizes))
        if _holds(sizes, choice, order, budget)
    ]
    assert tuple(found) in possible
    assert tuple(found) == tuple(map(min, zip(*possible, strict=True)))


def _holds(sizes: list[int], choice: tuple[int, ...], order: list, budget: dict) -> bool:
    devices = tuple(order[index] for index in choice)
    away = [size for size, own in zip(sizes, devices, strict=True) if own in ("cpu", "disk")]
    room = {device: size for device, size in budget.items() if device in devices}
    main = next((own for own in devices if isinstance(own, int)), None)
    if main is not None:
        room[main] -= max(away, default=0)
    if "cpu" in room:
        room["cpu"] -= max((s for s, own in zip(sizes, devices, strict=True) if own == "disk"), default=0)
    used = {d: sum(s for s, own in zip(sizes, devices, strict=True) if own == d) for d in room}
    return all(used[device] <= room[device] for device in room)


@unwarned
@given(
    models, budgets, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4), st.booleans()
)
def test_sizes_add_up_with_ties_and_fallback(model, budget, pairs, fallback):
    names = [name for name, _ in model.named_parameters()]
    for one, other in pairs:
        path, _, leaf = names[other % len(names)].rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(names[one % len(names)]))
    device_map = infer_auto_device_map(
        model, budget, no_split_module_classes="Block", fallback_allocation=fallback
    )

    check_device_map(model, device_map)
    held: dict[object, dict[int, int]] = {}
    for names in units(model):
        assert len({device_of(name, device_map) for name in names}) == 1
        for name in names:
            parameter = model.get_parameter(name)
            held.setdefault(device_of(name, device_map), {})[id(parameter)] = parameter.nbytes
    for device, size in budget.items():
        assert sum(held.get(device, {}).values()) <= size


def test_layers_fill_devices_in_order():
    assert infer_auto_device_map(Net(), {0: 136, 1: 100}) == {"first": 0, "norm": 0, "second": 1}
    assert infer_auto_device_map(Net(), {1: 100, 0: 136}) == {"first": 0, "norm": 0, "second": 1}
    assert infer_auto_device_map(Net(), {0: 236}) == {"": 0}
    assert infer_auto_device_map(Net(), {0: "1KB"}, clean_result=False) == {
        "first": 0,
        "norm": 0,
        "second": 0,
    }
    assert accel.infer_auto_device_map(Net()) == infer_auto_device_map(Net())


def test_room_is_kept_only_where_layers_are_offloaded():
    assert infer_auto_device_map(Net(), {0: 235, "cpu": 999}) == {
        "first": 0,
        "norm": "cpu",
        "second": "cpu",
    }
    assert infer_auto_device_map(Net(), {0: 164, "cpu": 999})["first"] == 0
    with pytest.warns(UserWarning, match=re.escape("no layer is placed on the device 0 (163 bytes)")):
        assert infer_auto_device_map(Net(), {0: 163, "cpu": 999}, offload_buffers=True) == {"": "cpu"}
    assert infer_auto_device_map(Net(), {"cpu": 235}) == {"first": "cpu", "norm": "disk", "second": "disk"}


def test_buffers_that_no_accelerator_has_room_for_are_warned_of():
    model = nn.Sequential(nn.Linear(3, 4), nn.Module(), nn.Module())
    for module in model[1:]:
        module.register_buffer("table", torch.empty(25))

    with pytest.warns(UserWarning, match="The buffers of offloaded layers have 200 bytes"):
        infer_auto_device_map(model, {0: 164, "cpu": 999})
    infer_auto_device_map(model, {0: 164, "cpu": 999}, offload_buffers=True)


def test_tied_weights_count_once_and_stay_together():
    model = nn.Sequential(nn.Embedding(10, 5), nn.Linear(5, 5), nn.Linear(5, 10, bias=False))
    model[2].weight = model[0].weight

    assert infer_auto_device_map(model, {0: 200, 1: 120}) == {"0": 0, "1": 1, "2": 0}
    assert infer_auto_device_map(model, {0: 199, 1: 320}) == {"": 1}


def test_ties_that_no_device_has_room_for_are_placed_one_by_one():
    model = nn.Sequential(*(build((False, [1, 50], [])) for _ in range(4)))
    for block in model:
        block.p0 = model[0].p0

    assert infer_auto_device_map(model, {0: 101, 1: 101}) == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_parameters_of_a_module_with_children_stay_together():
    model = build((False, [], [(False, [5, 5], [(False, [30], [])]), (False, [4], [])]))

    assert infer_auto_device_map(model, {0: 10, 1: 34}) == {
        "m0.p0": 0,
        "m0.p1": 0,
        "m0.m0": 1,
        "m1": 1,
    }


def test_dtypes_change_the_sizes():
    assert infer_auto_device_map(Net(), {0: 122}, dtype=torch.float16) == {"": 0}
    special = {"first.weight": torch.float32}
    assert infer_auto_device_map(Net(), {0: 146}, dtype="float16", special_dtypes=special) == {"": 0}
    assert (
        infer_auto_device_map(Net(), {0: 145, 1: 50}, dtype="float16", special_dtypes=special)["second"] == 1
    )


def test_an_accelerator_too_small_for_the_next_layer_takes_another_module():
    model = build((False, [], [(False, [50], []), (False, [], [(False, [6], []), (False, [4], [])])]))

    with pytest.warns(UserWarning, match="fallback_allocation=True looks for other layers"):
        assert infer_auto_device_map(model, {0: 45, "cpu": 99}, offload_buffers=True) == {"": "cpu"}
    assert infer_auto_device_map(model, {0: 10, 1: 50}, fallback_allocation=True) == {"m0": 1, "m1": 0}


def test_modules_without_tensors_follow_the_layer_before():
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    assert infer_auto_device_map(model, {0: 0, 1: 24, 2: 24}) == {"0": 1, "1": 1, "2": 1, "3": 2}
    assert infer_auto_device_map(nn.ReLU(), {0: 5}) == {"": 0}


def test_verbose_prints_each_layer(capsys):
    infer_auto_device_map(Net(), {0: 164, "cpu": 999}, verbose=True)

    said = capsys.readouterr().out
    assert "first (64 bytes): 0" in said
    assert "second (100 bytes): cpu" in said
    assert "100 bytes where they run" in said


def test_a_limited_disk_can_be_too_small():
    with pytest.raises(ValueError, match=re.escape("norm (72 bytes) has no room left") + ".*disk: 99"):
        infer_auto_device_map(Net(), {"cpu": 0, "disk": 99})


def test_each_layer_is_looked_at_a_few_times_whatever_the_size(monkeypatch):
    visits = []
    put = plans._Placer.put
    monkeypatch.setattr(
        plans._Placer, "put", lambda self, group: visits.append(len(group)) or put(self, group)
    )

    def work(blocks: int) -> int:
        tree = (False, [], [(False, [2], [(False, [3], []), (False, [4], [])]) for _ in range(blocks)])
        model = build(tree)
        for block in model.children():
            block.m1.p0 = model.m0.m1.p0
        visits.clear()
        layout = make_layout(model)
        assert len(layout.layers) == 3 * blocks
        infer_auto_device_map(model, {0: 2 * blocks, 1: blocks, "cpu": blocks}, offload_buffers=True)
        return sum(visits)

    assert work(400) < 3 * work(200)


def test_the_size_of_each_tensor_is_requested_once_and_untied_layers_are_placed_by_the_device(monkeypatch):
    numel, fill = torch.Tensor.numel, plans._Placer.place_untied
    asked, filled = [], []
    monkeypatch.setattr(torch.Tensor, "numel", lambda tensor: asked.append(id(tensor)) or numel(tensor))
    monkeypatch.setattr(
        plans._Placer, "place_untied", lambda self, *span: filled.append(span) or fill(self, *span)
    )
    model = build((False, [], [(False, [2, 3], []) for _ in range(300)]))
    get_balanced_memory(model, {0: 9000, 1: 9000, 2: 9000}, low_zero=True)

    assert len(asked) == len(set(asked)) == 600
    assert len(filled) < 60  # a search by halves, in which the number of layers does not count


def test_names_that_a_model_lacks_are_warned_of():
    with pytest.warns(
        UserWarning, match=r"names 'third', 'nor', which Net does not have.*first, norm, second"
    ):
        check_device_map(Net(), {"": 0, "third": 1, "nor": 2})


@pytest.mark.parametrize("device_map", [None, "auto", ["first"]])
def test_what_is_no_map_is_named(device_map):
    with pytest.raises(
        TypeError,
        match=rf"device_map must be a dict of devices by name .* not {re.escape(repr(device_map))}\.",
    ):
        check_device_map(Net(), device_map)


def test_a_map_must_cover_the_model():
    check_device_map(Net(), {"": 0})
    check_device_map(Net(), {"first": 0, "norm": "cpu", "second.weight": "disk", "second.bias": 1})
    with pytest.raises(ValueError, match=r"no device for second\.weight, second\.bias\. Add"):
        check_device_map(Net(), {"first": 0, "norm": 0})
    with pytest.raises(ValueError, match=r"no device for norm\..*names 'nor', which Net does not have"):
        check_device_map(Net(), {"first": 0, "second": 0, "nor": 0})
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    with pytest.raises(ValueError, match=r"4\.bias and 8 more\."):
        check_device_map(many, {})


def test_maps_are_shortened():
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 0}) == {"a": 0, "b.x": 1, "b.y": 0}
    assert clean_device_map({"a.x": 0, "a.y": 0, "b": 0}) == {"": 0}
    assert clean_device_map({"a.x": 0, "ab.y": 0, "b": 1}) == {"a.x": 0, "ab.y": 0, "b": 1}
    assert clean_device_map({"a": 0, "a.x": 1, "a.y": 1}) == {"a": 0, "a.x": 1, "a.y": 1}
    assert clean_device_map({"a.b.x": 0, "a.b.y": 0, "c.x": 0, "c.y": 0}, "a") == {
        "a.b": 0,
        "c.x": 0,
        "c.y": 0,
    }
    assert list(clean_device_map({"z.x": 0, "z.y": 0, "a": 1})) == ["z", "a"]
