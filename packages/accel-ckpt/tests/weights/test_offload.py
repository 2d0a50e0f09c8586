from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from accel_ckpt.errors import CorruptCheckpointError
from accel_ckpt.weights.load import load_offloaded_weights
from accel_ckpt.weights.offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)

STATE = {
    "a.w": torch.randn(2, 3),
    "a.half": torch.randn(3).bfloat16(),
    "eight": torch.randn(3).to(torch.float8_e4m3fn),
    "n": torch.tensor(7),
    "c": torch.randn(2, dtype=torch.complex64),
    "flag": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
    "view": torch.arange(12.0).reshape(3, 4)[1:, ::2],
}


def bits(value: torch.Tensor) -> Any:
    return value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).tolist()


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "off", STATE)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "off")

    assert list(loader) == list(STATE)
    assert len(loader) == len(STATE)
    for name, value in STATE.items():
        assert bits(loader[name]) == bits(value), name
    assert sorted(os.listdir(tmp_path / "off")) == sorted([*(f"{name}.dat" for name in STATE), "index.json"])
    info = json.loads((tmp_path / "off" / "index.json").read_text())["a.half"]
    assert info == {"dtype": "bfloat16", "shape": [3]}
    with pytest.raises(KeyError):
        loader["b"]


def test_what_is_written_to_a_weight_stays_out_of_the_file(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, STATE)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    loader["a.w"].zero_()

    assert torch.equal(loader["a.w"], STATE["a.w"])


def test_an_index_grows(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(1)})
    index = offload_weight(torch.zeros(2), "b", tmp_path, {})
    assert index is not None
    save_offload_index(index, tmp_path)
    assert list(read_offload_index(tmp_path)) == ["a", "b"]
    assert offload_weight(torch.zeros(2), "c", tmp_path) is None
    save_offload_index({}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_in_memory_come_first(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"m": torch.ones(1), "x": torch.ones(2), "y": torch.zeros(1)})
    memory = {"m": torch.full((1,), 5.0), "n": torch.ones(1)}
    loader = OffloadedWeightsLoader(memory, tmp_path)

    assert list(loader) == ["m", "n", "x", "y"]
    assert len(loader) == 4
    assert loader["m"] is memory["m"]
    assert loader["x"].tolist() == [1, 1]
    assert "z" not in loader
    part = OffloadedWeightsLoader(None, tmp_path, {"x": {"dtype": "float32", "shape": [2]}}, device="meta")
    assert list(part) == ["x"]
    assert part["x"].is_meta
    assert list(OffloadedWeightsLoader(memory)) == ["m", "n"]


def test_a_file_that_changes_after_the_loader_was_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    loader = OffloadedWeightsLoader(index={"a": {"safetensors_file": str(file)}})
    save_file({"a": torch.zeros(2), "b": torch.ones(1)}, tmp_path / "newer")
    file.write_bytes((tmp_path / "newer").read_bytes())

    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.* has changed"):
        loader["a"]


def test_a_loader_without_a_source_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()
    with pytest.raises(ValueError, match="save_folder="):
        OffloadedWeightsLoader(index={"x": {"dtype": "float32", "shape": [2]}})
    with pytest.raises(FileNotFoundError):
        OffloadedWeightsLoader(save_folder=tmp_path)


# Folders of other tools, byte by byte

BYTES = {
    "a.weight": ("float32", [2, 1], struct.pack("<2f", 1.5, -2.0)),
    "a.bias": ("bfloat16", [3], bytes.fromhex("0000803f0040")),
    "half": ("float16", [1], bytes.fromhex("003c")),
    "count": ("int64", [], struct.pack("<q", 7)),
    "flags": ("bool", [2], b"\1\0"),
    "small": ("float8_e4m3fn", [2], b"\x38\x40"),
    "none": ("float32", [0, 2], b"\0"),
}
VALUES = {
    "a.weight": [[1.5], [-2.0]],
    "a.bias": [0, 1, 2],
    "half": [1],
    "count": 7,
    "flags": [True, False],
    "small": [1, 2],
    "none": [],
}


def test_a_folder_built_by_hand_is_read(tmp_path: Path) -> None:
    for name, (_, _, content) in BYTES.items():
        (tmp_path / f"{name}.dat").write_bytes(content)
    index = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape, _) in BYTES.items()}
    (tmp_path / "index.json").write_text(json.dumps(index, indent=2))
    loader = OffloadedWeightsLoader(save_folder=tmp_path)

    assert list(loader) == list(BYTES)
    for name, (dtype, shape, _) in BYTES.items():
        assert loader[name].dtype is getattr(torch, dtype)
        assert list(loader[name].shape) == shape
        assert loader[name].float().tolist() == VALUES[name]


def test_a_folder_is_written_byte_for_byte(tmp_path: Path) -> None:
    state = {
        name: torch.tensor(VALUES[name]).to(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, _) in BYTES.items()
    }
    offload_state_dict(tmp_path / "new" / "folder", state)
    folder = tmp_path / "new" / "folder"

    assert {path.name: path.read_bytes() for path in folder.glob("*.dat")} == {
        f"{name}.dat": content for name, (_, _, content) in BYTES.items()
    }
    index = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape, _) in BYTES.items()}
    assert (folder / "index.json").read_text() == json.dumps(index, indent=2)


def test_a_parameter_is_written_and_a_name_is_replaced(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    index = offload_weight(parameter, "w", tmp_path, {"old": {"dtype": "float32", "shape": [1]}})
    assert index == {
        "old": {"dtype": "float32", "shape": [1]},
        "w": {"dtype": "float32", "shape": [2]},
    }
    offload_state_dict(tmp_path, {"w": torch.zeros(3)})
    assert OffloadedWeightsLoader(save_folder=tmp_path)["w"].tolist() == [0, 0, 0]
    with pytest.raises(FileNotFoundError):
        offload_weight(parameter, "w", tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "info", "message"),
    [
        ("../w", {"dtype": "float32", "shape": [1]}, r"names the file '\.\./w\.dat', which is not inside"),
        ("/w", {"dtype": "float32", "shape": [1]}, "not inside its folder"),
    ],
)
def test_an_index_cannot_point_outside(tmp_path: Path, name: str, info: dict[str, Any], message: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({name: info}))
    with pytest.raises(CorruptCheckpointError, match=message):
        OffloadedWeightsLoader(save_folder=tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_an_entry_that_is_no_plain_file_is_rejected(tmp_path: Path, kind: str) -> None:
    offload_state_dict(tmp_path / "off", {"a": torch.ones(1)})
    file = tmp_path / "off" / "a.dat"
    file.rename(tmp_path / "elsewhere")
    {
        "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
        "pipe": lambda: os.mkfifo(file),
        "folder": file.mkdir,
    }[kind]()
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "off")
    with pytest.raises(CorruptCheckpointError, match=r"a\.dat is a (symbolic link|pipe|folder)"):
        loader["a"]


def test_damaged_files_and_names_are_reported(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(4)})
    info = {"dtype": "float32", "shape": [5]}
    with pytest.raises(CorruptCheckpointError, match=r"has 16 bytes; \[5\] of torch.float32 are 20"):
        load_offloaded_weight(tmp_path / "a.dat", info)
    for bad in ({"dtype": "save", "shape": [4]}, {"shape": [4]}, {"dtype": "float32"}, {"file": "a"}):
        with pytest.raises(CorruptCheckpointError, match=r"a\.dat has the entry .*, which is not a tensor"):
            load_offloaded_weight(tmp_path / "a.dat", bad)
    with pytest.raises(CorruptCheckpointError, match="are 4"):
        load_offloaded_weight(tmp_path / "a.dat", {"dtype": "float32", "shape": [1]})
    (tmp_path / "index.json").write_text("[1")
    with pytest.raises(CorruptCheckpointError, match="not an index of offloaded weights"):
        read_offload_index(tmp_path)
    with pytest.raises(ValueError, match="name of a file, not 'a/b'"):
        offload_weight(torch.ones(1), "a/b", tmp_path)


def test_offloaded_weights_go_back_into_a_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    offload_state_dict(tmp_path, {"0.weight": before["0.weight"], "0.bias": before["0.bias"]})
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    empty[1].weight = empty[0].weight
    load_offloaded_weights(empty, read_offload_index(tmp_path), tmp_path)

    assert torch.equal(empty[0].weight, before["0.weight"])
    assert empty[1].weight is empty[0].weight
    assert empty[1].bias.is_meta
    load_offloaded_weights(empty, {}, tmp_path / "nowhere")


def test_offloaded_weights_take_the_type_of_the_model_or_are_rejected(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"weight": torch.ones(1, 2), "running_mean": torch.ones(3)})
    index = read_offload_index(tmp_path)
    model = torch.nn.Linear(2, 1).half()
    load_offloaded_weights(model, {"weight": index["weight"]}, tmp_path)
    assert model.weight.dtype is torch.float16
    assert model.weight.tolist() == [[1, 1]]
    norm = torch.nn.BatchNorm1d(3)
    load_offloaded_weights(norm, {"running_mean": index["running_mean"]}, tmp_path)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="Linear has no weight 'running_mean'"):
        load_offloaded_weights(model, index, tmp_path)
    with pytest.raises(ValueError, match=r"weight has the shape \[1, 2\] in .* and \[3\] in BatchNorm1d"):
        load_offloaded_weights(norm, index, tmp_path)
    with pytest.raises(CorruptCheckpointError, match="not inside its folder"):
        load_offloaded_weights(Odd(), {"../w": index["weight"]}, tmp_path)


class Odd(torch.nn.Module):
    """A module whose weight has a name that leads out of a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 2))
        self._parameters["../w"] = self.weight


def test_parts_and_prefixes() -> None:
    state: Any = {"a.w": 1, "ab.w": 2, "a": 3, "c.d.e": 4}
    assert extract_submodules_state_dict(state, ["a", "c.d"]) == {"a.w": 1, "a": 3, "c.d.e": 4}
    part = PrefixedDataset({"a.w": 1, "a.b": 2, "c": 3}, "a.")
    assert part["w"] == 1
    assert list(part) == ["a.w", "a.b"]
    assert len(part) == 3
    assert "w" in part
    with pytest.raises(KeyError):
        part["a.w"]
    assert extract_submodules_state_dict(state, []) == {}
