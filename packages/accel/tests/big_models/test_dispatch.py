"""Models dispatched by a device map, and loaded on the way, beside the plain model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import (
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_ckpt.errors import CheckpointError


class Tied(nn.Module):
    """An embedding that is the head too, blocks between them, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.tensor([1, 2, 3, 10])
MADE = ["auto", "sequential"]
MAPS = {
    "memory": {"": "cpu"},
    "disk": {"embedding": "cpu", "head": "cpu", "shift": "cpu", "blocks": "disk"},
    "mixed": {
        "embedding": "cpu",
        "shift": "cpu",
        "blocks.0": "disk",
        "blocks.1": "cpu",
        "blocks.2": "disk",
        "head": "cpu",
    },
    "a tied head on the disk": {"embedding": "cpu", "shift": "cpu", "blocks": "disk", "head": "disk"},
}


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Tied().eval()


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_a_dispatched_model_computes_the_same(net, device_map, tmp_path: Path):
    plain = copy.deepcopy(net)

    model = dispatch_model(net, device_map, offload_dir=tmp_path, force_hooks=True)

    assert model.hf_device_map == device_map
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), plain(IDS))
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_what_is_on_the_disk_takes_no_memory(net, tmp_path: Path):
    dispatch_model(net, MAPS["disk"], offload_dir=tmp_path)

    assert all(weight.is_meta for weight in net.blocks.parameters())
    assert not net.embedding.weight.is_meta


def test_ways_to_be_wrong_change_nothing(net, tmp_path: Path):
    def rejects(match: str, device_map: dict, **options) -> None:
        with pytest.raises(ValueError, match=match):
            dispatch_model(net, device_map, **options)
        assert not any(tensor.is_meta for tensor in net.state_dict().values())
        assert not hasattr(net, "hf_device_map")

    rejects("nothing", {"": "cpu", "nothing": "cpu"})
    rejects("embedding", {"blocks": "cpu", "shift": "cpu"})
    rejects("99", {"": 99})
    rejects("disk_offload", {"": "disk"})
    rejects("offload_dir|folder", MAPS["disk"])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    "device_map", [*MAPS.values(), "auto", "sequential"], ids=[*MAPS, "auto", "sequential"]
)
def test_a_checkpoint_is_loaded_to_its_places(net, device_map, suffix, tmp_path: Path):
    file = _save(net, tmp_path / f"model.{suffix}")
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight

    model = load_checkpoint_and_dispatch(empty, file, device_map, offload_folder=tmp_path / "offloaded")

    with torch.no_grad():
        assert torch.equal(model(IDS), net(IDS))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in net.state_dict().items())


def test_safetensors_on_the_disk_are_read_where_they_are(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight
    offloaded = tmp_path / "offloaded"

    load_checkpoint_and_dispatch(empty, file, MAPS["disk"], offload_folder=offloaded)

    assert not list(offloaded.rglob("*.dat"))


def test_a_checkpoint_that_is_damaged_or_cut_off_leaves_the_model_empty(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-50])
    with init_empty_weights():
        empty = Tied().eval()

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint_and_dispatch(empty, file, {"": "cpu"})
    assert all(weight.is_meta for weight in empty.parameters())


def test_a_map_of_an_unknown_kind_is_named(net, tmp_path: Path):
    file = _save(net, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"balanced_low_0.*'best'"):
        load_checkpoint_and_dispatch(net, file, "best")


def _save(net: nn.Module, file: Path) -> Path:
    if file.suffix == ".bin":
        torch.save(net.state_dict(), file)
    else:
        from safetensors.torch import save_model

        save_model(net, str(file))
    return file
