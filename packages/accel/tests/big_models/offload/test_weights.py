"""Where offloaded weights are: found before anything changes, written once, and given back."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import cpu_offload, disk_offload, dispatch_model
from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.base import ModelHook, add_hook_to_module
from accel.big_models.hooks.prefetch import EndOfForward
from accel.big_models.offload.weights import (
    collect,
    hooks_of,
    materialize_meta,
    named_tensors,
    offloaded_values,
    tied_params,
    use_prefetcher,
)
from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.weights.offload import OffloadedWeightsLoader, offload_state_dict, read_offload_index


class Net(nn.Module):
    """Two layers that share a weight, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.register_parameter("nothing", None)


@pytest.fixture
def net() -> Net:
    return Net().requires_grad_(False)


def empty_net() -> Net:
    net = Net().to("meta")
    net.b.weight = net.a.weight  # a move of the model unties them
    return net


def on(*disk: str) -> Callable[[str], str | None]:
    """Place the weights that are named on the disk, and leave others."""
    return lambda name: "disk" if name in disk else None


def everywhere(device: str) -> Callable[[str], str | None]:
    return lambda name: device


def test_tensors_are_listed_under_all_names_with_their_kinds(net: Net) -> None:
    found = named_tensors(net)

    assert {name: kind for name, (_, kind) in found.items()} == {
        "table": "buffer",
        "unsaved": "own buffer",
        "a.weight": "parameter",
        "b.weight": "parameter",
        "b.bias": "parameter",
    }
    assert found["a.weight"][0] is found["b.weight"][0] is net.a.weight


def test_weights_in_memory_are_those_of_the_model(net: Net) -> None:
    found = collect(net, everywhere("cpu"), offload_buffers=False, state_dict={})

    assert set(found.in_memory) == found.names == {"a.weight", "b.weight", "b.bias"}
    assert found.in_memory["b.weight"] is net.a.weight
    assert found.on_disk == set()
    assert found.write() == {}


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_buffers_that_are_saved_are_offloaded_when_requested(net: Net, device: str, tmp_path: Path) -> None:
    found = collect(net, everywhere(device), offload_buffers=True, state_dict={}, folder=tmp_path)

    assert found.names == {"a.weight", "b.weight", "b.bias", "table"}


def test_values_given_count_before_those_of_the_model(net: Net) -> None:
    other = torch.full((2, 2), 5.0)
    found = collect(net, everywhere("cpu"), False, {"b.weight": other})  # under another name of it

    assert found.in_memory["a.weight"] is other


def test_a_tied_weight_is_written_once(net: Net, tmp_path: Path) -> None:
    found = collect(net, everywhere("disk"), False, {}, tmp_path / "new")
    assert not (tmp_path / "new").exists()  # nothing changes before it is written
    index = found.write()

    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "a.weight.dat",
        "b.bias.dat",
        "index.json",
    ]
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new", index=index)
    assert torch.equal(loader["b.weight"], net.a.weight)
    assert set(read_offload_index(tmp_path / "new")) == {"a.weight", "b.bias"}


def test_a_tied_weight_stays_in_memory_where_one_of_its_names_does(net: Net, tmp_path: Path) -> None:
    found = collect(net, on("b.weight", "b.bias"), False, {}, tmp_path)

    assert set(found.in_memory) == {"b.weight"}
    assert set(found.to_write) == {"b.bias"}


def test_weights_without_values_come_from_the_index_or_the_folder(net: Net, tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a.weight": net.a.weight, "b.bias": net.b.bias})
    empty = empty_net()

    found = collect(empty, everywhere("disk"), False, {}, tmp_path)
    assert found.to_write == {}
    assert {name: entry["weight_name"] for name, entry in found.write().items()} == {
        "a.weight": "a.weight",
        "b.weight": "a.weight",
        "b.bias": "b.bias",
    }
    given = {"b.weight": {"safetensors_file": "x", "dtype": "float32"}, "b.bias": {"safetensors_file": "x"}}
    found = collect(empty, everywhere("disk"), False, {}, None, given)
    assert found.index["a.weight"]["weight_name"] == "b.weight"


def test_what_has_no_values_is_named(tmp_path: Path) -> None:
    empty = empty_net()
    with pytest.raises(ValueError, match=r"Net has no values for a\.weight, b\.weight, b\.bias"):
        collect(empty, everywhere("cpu"), False, {})
    with pytest.raises(ValueError, match=rf"values for a\.weight.*, nor has {tmp_path}"):
        collect(empty, everywhere("disk"), False, {}, tmp_path)


def test_the_disk_needs_a_folder(net: Net) -> None:
    with pytest.raises(ValueError, match=r"^b\.bias of Net are to be on the disk: pass offload_dir="):
        collect(net, on("b.bias"), False, {})


def test_a_damaged_index_is_named_and_what_was_written_is_deleted(net: Net, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("[]")
    found = collect(net, everywhere("disk"), False, {}, tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json is not an index of offloaded weights"):
        found.write()

    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9))
    found = collect(model, everywhere("disk"), False, {}, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(OSError, match=r"the weight 1\.weight \(324 bytes\) cannot be offloaded"):
            found.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list(tmp_path.iterdir()) == []


def test_only_weights_of_several_modules_are_tied(net: Net) -> None:
    net.c = net.b  # a module under two names has its weights once
    (copies,) = tied_params(net).values()

    assert copies == {}


class Viewing(Net):
    """Adds the first row of the weight that is tied, a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.a.weight.data[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) + self.row


@pytest.mark.parametrize("place", ["cpu", "a and b", "all"])
def test_a_view_is_not_taken_for_the_tied_weight_that_it_begins_with(place: str, tmp_path: Path) -> None:
    model = Viewing().requires_grad_(False)
    x = torch.ones(1, 2)
    expected = model(x)

    assert tied_params(model) == {}
    device_map = {"": "cpu", "a": "disk", "b": "disk"} if place == "a and b" else {"": "cpu"}
    if place == "all":
        disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=True)
    else:
        dispatch_model(model, device_map, offload_dir=tmp_path, force_hooks=True)

    assert torch.equal(model(x), expected)
    assert torch.equal(model.state_dict()["row"], model.state_dict()["a.weight"][0])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_values_of_an_offloaded_model_are_found_again(net: Net, kind: str, tmp_path: Path) -> None:
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    model = cpu_offload(net) if kind == "memory" else disk_offload(net, tmp_path)
    found = offloaded_values(model)

    assert set(found) == {"a.weight", "b.weight", "b.bias"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert offloaded_values(Net()) == {}


def test_tensors_without_values_are_filled_and_stay_tied(net: Net) -> None:
    table, weight = net.table, net.a.weight.clone()
    net.a.weight = net.b.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
    materialize_meta(net, {"b.weight": weight, "table": torch.zeros(3)})

    assert net.a.weight is net.b.weight
    assert isinstance(net.a.weight, nn.Parameter)
    assert torch.equal(net.a.weight, weight)
    assert net.a.weight.data_ptr() != weight.data_ptr()  # it may have been mapped from a file
    assert net.table is table  # it had values


def test_only_modules_with_weights_on_the_disk_read_ahead(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    dispatch_model(model, {"0": "cpu", "1": "disk", "2": "cpu"}, offload_dir=tmp_path)

    fetching = [
        name
        for name, module in model.named_modules()
        for hook in hooks_of(module)
        if isinstance(hook, AlignDevicesHook) and hook.prefetcher is not None
    ]
    assert fetching == ["1"]
    assert any(isinstance(hook, EndOfForward) for hook in hooks_of(model))

    resident = cpu_offload(nn.Sequential(nn.Linear(2, 2)))
    use_prefetcher(resident, set())
    assert not any(isinstance(hook, EndOfForward) for hook in hooks_of(resident))


def test_hooks_are_listed_one_by_one() -> None:
    module, hooks = nn.Linear(1, 1), [ModelHook(), ModelHook()]
    assert hooks_of(module) == ()
    for hook in hooks:
        add_hook_to_module(module, hook, append=True)

    assert list(hooks_of(module)) == hooks


def sharded(folder: str) -> list[str]:
    """What each way to offload says of a model that FSDP has sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    said = []
    for shard in (fully_shard, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"))):
        ways: list[Any] = [
            cpu_offload,
            lambda model: disk_offload(model, folder),
            lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
        ]
        for way in ways:
            model = shard(nn.Sequential(nn.Linear(2, 2)))
            with pytest.raises(ValueError, match="is sharded by FSDP") as error:
                way(model)
            said.append(str(error.value))
            model(torch.ones(1, 2)).sum().backward()  # as before
    return said


def test_models_that_are_sharded_are_left_to_what_shards_them(world: Any, tmp_path: Path) -> None:
    said = world.run(sharded, str(tmp_path))

    assert len(said[0]) == 6
    assert all("CPUOffloadPolicy of fully_shard" in message for message in said[0])
    assert list(tmp_path.iterdir()) == []
