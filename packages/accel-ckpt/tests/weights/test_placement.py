from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_ckpt.errors import CheckpointError
from accel_ckpt.weights.load import load_checkpoint_in_model
from accel_ckpt.weights.offload import OffloadedWeightsLoader
from accel_world.warned import warns_once


class Net(nn.Module):
    """Three layers, of which two share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.full((3,), 2.0))


class Normed(nn.Module):
    """A layer, a norm with buffers of two kinds, and a layer inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.norms = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.block = nn.ModuleDict({"norm": nn.Linear(3, 1)})


def sevens() -> dict[str, torch.Tensor]:
    """Weights of Normed that no fresh model has."""
    state = Normed().state_dict()
    return {name: value * 0 + 7 for name, value in state.items()}


@pytest.mark.parametrize("dtype", ["float16", "torch.bfloat16", torch.float64])
def test_dtype_and_the_modules_that_stay_float32(tmp_path: Path, dtype: Any) -> None:
    torch.save(sevens(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = Normed()
    load_checkpoint_in_model(
        model, tmp_path, {"": "cpu"}, dtype=dtype, keep_in_fp32_modules=["norm", "a.bias", "weight"]
    )
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."))

    kept = {name for name, value in model.state_dict().items() if value.dtype is torch.float32}
    assert kept == {
        "a.bias",
        *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")),
        "block.norm.weight",
        "block.norm.bias",
    }
    assert model.norm.num_batches_tracked.dtype is torch.int64  # type: ignore[union-attr]
    assert model.norms.weight.dtype is wanted
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, dtype=dtype)
    assert model.norm.running_mean.dtype is wanted  # type: ignore[union-attr]
    assert all((value == 7).all() for value in model.state_dict().values())


def test_without_a_device_map_weights_are_filled_in_place(tmp_path: Path) -> None:
    torch.save({name: value.double() for name, value in sevens().items()}, tmp_path / "pytorch_model.bin")
    model = Normed().half()
    parameters = list(model.parameters())
    load_checkpoint_in_model(model, tmp_path)
    assert model.a.weight.dtype is torch.float16
    load_checkpoint_in_model(model, tmp_path, dtype="float32")

    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert all(p.dtype is torch.float32 and (p == 7).all() for p in parameters)


def test_the_disk_has_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    torch.save(sevens(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = Normed()
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "index.json").write_text('{"old": {"dtype": "float32", "shape": [1]}}')
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, tmp_path / "off", dtype="bfloat16")

    parameters = {name: value.numel() * 4 for name, value in model.named_parameters()}
    files = {path.name: path.stat().st_size for path in (tmp_path / "off").glob("*.dat")}
    assert files == {f"{name}.dat": size for name, size in parameters.items()}
    index = json.loads((tmp_path / "off" / "index.json").read_text())
    assert index["norms.weight"] == {"dtype": "float32", "shape": [3, 3]}
    assert list(index) == ["old", *parameters]
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in model.parameters())
    assert model.norm.running_mean.tolist() == [7, 7, 7]  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("first", ["a.weight", "b.weight"])
@pytest.mark.parametrize("on_disk", ["a", "b"])
def test_tied_weights_of_memory_and_disk_stay_in_memory(tmp_path: Path, first: str, on_disk: str) -> None:
    model = Net()
    state = model.state_dict()
    torch.save({first: state.pop(first), **state}, tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        other = Net()
    load_checkpoint_in_model(other, tmp_path, {"": "cpu", on_disk: "disk"}, tmp_path / "off")

    assert other.b.weight is other.a.weight
    assert torch.equal(other.a.weight, model.a.weight)
    assert set(OffloadedWeightsLoader(save_folder=tmp_path / "off")) == {f"{on_disk}.bias"}


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_what_does_not_fit_leaves_the_model_alone(tmp_path: Path, device_map: Any) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for change in ({"c.bias": torch.ones(9)}, {"d": torch.ones(1)}, {"c.bias": 3}):
        torch.save({**Net().state_dict(), **change}, tmp_path / "pytorch_model.bin")
        with pytest.raises(RuntimeError, match=r"c\.bias has the shape|not in the model: d|c\.bias is a int"):
            load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list, not weights by name"):
        load_checkpoint_in_model(model, tmp_path, device_map)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("zipped", [False, True])
def test_a_loaded_model_does_not_need_its_files(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(sevens(), file, _use_new_zipfile_serialization=zipped)
    models = [Normed(), Normed().to("meta"), Normed().to("meta")]
    for target, device_map in zip(models, (None, None, {"": "cpu"}), strict=True):
        load_checkpoint_in_model(target, tmp_path, device_map, offload_state_dict=True)
    with file.open("r+b") as raw:
        raw.write(b"\0" * file.stat().st_size)

    assert all((p == 7).all() for model in models for p in model.parameters())


def _sharded(folder: str) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    rank = torch.distributed.get_rank()
    told = []
    for full in (True, False):
        model = Normed()
        fully_shard(model)
        file = f"{folder}/whole.bin"
        if not full:
            file = f"{folder}/part{rank}.bin"
            torch.save({name: value * 0 + 7 for name, value in model.state_dict().items()}, file)
        load_checkpoint_in_model(model, file, strict=True, full_state_dict=full)
        told.append(all((p.full_tensor() == 7).all() for p in model.parameters()))  # type: ignore[attr-defined]
    try:
        load_checkpoint_in_model(model, file, {"": "cpu"})
    except ValueError as error:
        told.append(str(error))
    with warns_once(UserWarning, "dtype is ignored"):
        load_checkpoint_in_model(model, f"{folder}/whole.bin", dtype="bfloat16")
    return told


def test_a_sharded_model_takes_full_tensors_or_its_shard(world: Any, tmp_path: Path) -> None:
    torch.save(sevens(), tmp_path / "whole.bin")
    told = world.run(_sharded, str(tmp_path), size=2, timeout_s=100)
    assert told == [[True, True, "a model that is sharded over processes takes no device_map; omit it."]] * 2
