"""load_checkpoint_in_model and load_state_dict with files that are damaged, odd, or named as one likes."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import re
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.files import tensors
from accel_ckpt.training_state.load import load_accelerator_state
from accel_ckpt.weights.files import save_weights
from accel_ckpt.weights.load import (
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_placed,
    load_state_dict,
)
from accel_ckpt.weights.offload import OffloadedWeightsLoader
from accel_ckpt.weights.placement import WeightPlacement

# Damaged files

KINDS = {
    "safetensors": "model.safetensors",
    "torch": "pytorch_model.bin",
    "old torch": "pytorch_model.bin",
    "index": "model.safetensors.index.json",
    "part": "model-00002-of-00002.safetensors",
    "torch part": "pytorch_model-00002-of-00002.bin",
}
# The end of a zip file that is the second of two, which zipfile raises an error about.
ZIP_END = struct.pack("<4sLQL", b"PK\6\7", 1, 0, 2) + b"PK\5\6" + bytes(18)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "begins": lambda raw: raw[: len(raw) // 8],
    "cut off": lambda raw: raw[: len(raw) - 40],
    "garbled": lambda raw: bytes(255 - byte for byte in raw[:200]) + raw[200:],
    "another disk": lambda raw: raw[: len(raw) // 8] + ZIP_END,
    "another": lambda raw: b"<html><body>404 Not Found</body></html>",
}


def written(folder: Path, kind: str) -> Path:
    """Write weights into a folder, and return the file that is to be damaged."""
    state = nn.Linear(30, 30).state_dict()
    safe = kind in ("safetensors", "index", "part")
    if kind == "old torch":
        torch.save(state, folder / KINDS[kind], _use_new_zipfile_serialization=False)
    else:
        save_weights(state, folder, 200 if kind in ("index", "part", "torch part") else "1GB", safe)
    return folder / KINDS[kind]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_with_what_was_wrong(tmp_path: Path, kind: str, damage: str) -> None:
    file = written(tmp_path, kind)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    model = nn.Linear(30, 30)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_in_model(model, tmp_path)
    message = str(error.value)

    assert message.startswith(str(file))
    assert len(message) > len(str(file)) + 40
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if kind != "index":
        with pytest.raises(CheckpointError, match=file.name):
            load_state_dict(file)
    if kind in ("safetensors", "part") and damage == "cut off":
        assert "lacks the end of " + ("bias" if kind == "part" else "weight") in message


@pytest.mark.parametrize("name", sorted({*KINDS.values()}))
@pytest.mark.timeout(100)
def test_a_pipe_is_rejected_immediately(tmp_path: Path, name: str) -> None:
    kind = next(kind for kind in KINDS if KINDS[kind] == name)
    file = written(tmp_path, kind)
    file.unlink()
    os.mkfifo(file)
    for path in (tmp_path, file):
        with pytest.raises(CorruptCheckpointError, match=rf"{name} is a pipe where a file is expected"):
            load_checkpoint_in_model(nn.Linear(30, 30), path)
    if kind != "index":
        with pytest.raises(CorruptCheckpointError, match="is a pipe"):
            load_state_dict(file)


def test_another_shape_is_reported_with_its_file(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"weight has the shape \[2\] in .*model\.safetensors and"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)


# Weights that one side lacks, and names of indexes


def test_surplus_weights_are_logged_and_an_error_if_strict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {**nn.Linear(1, 1).state_dict(), "surplus": torch.ones(1)}
    save_weights(state, tmp_path)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    (record,) = caplog.records
    assert record.name == "accel_ckpt.weights.load"
    assert "in the files and not in the model: surplus" in record.getMessage()
    with pytest.raises(RuntimeError, match="in the files and not in the model: surplus"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path, strict=True)


@pytest.mark.parametrize("name", ["parts.json", "parts.index", "parts"])
@pytest.mark.parametrize("bare", [False, True])
def test_an_index_may_have_any_name(tmp_path: Path, name: str, bare: bool) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    files = {}
    for key, value in model.state_dict().items():
        files[key] = f"{key}.safetensors"
        save_file({key: value}, tmp_path / files[key])
    document: dict[str, Any] = files if bare else {"metadata": {"total_size": 8}, "weight_map": files}
    (tmp_path / name).write_text(json.dumps(document, indent=1))
    load_checkpoint_in_model(other, tmp_path / name, strict=True)
    assert other.weight.item() == model.weight.item()

    for empty in ("{}", '{"weight_map": {}}', '{"metadata": {}}', "{"):
        (tmp_path / name).write_text(empty)
        with pytest.raises(CorruptCheckpointError, match=f"{name} is not an index of weights"):
            load_checkpoint_in_model(other, tmp_path / name)


# Compiled submodules


def partly_compiled(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0][0] = torch.compile(model[0][0], backend="eager")
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("whole", [True, False], ids=["all names have it", "some names have it"])
def test_names_of_compiled_modules_load_either_way(tmp_path: Path, suffix: str, whole: bool) -> None:
    """Also files that have `_orig_mod` in their names, as Accelerate's have."""
    source = partly_compiled(1) if whole else partly_compiled(1)._orig_mod
    state = dict(source.state_dict())
    assert any("_orig_mod" in name for name in state)
    tensors.write(state, tmp_path / f"odd.{suffix}", suffix == "safetensors")
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    load_checkpoint_in_model(plain, tmp_path / f"odd.{suffix}", strict=True)
    assert [*map(torch.Tensor.tolist, plain.parameters())] == [*map(torch.Tensor.tolist, state.values())]

    tensors.write(plain.state_dict(), tmp_path / f"plain.{suffix}", suffix == "safetensors")
    for name in ("odd", "plain"):
        other = partly_compiled(2)
        load_checkpoint_in_model(other, tmp_path / f"{name}.{suffix}", strict=True)
        assert [*map(torch.Tensor.tolist, other.parameters())] == [*map(torch.Tensor.tolist, state.values())]


def test_a_checkpoint_with_names_of_compiled_modules_loads(tmp_path: Path) -> None:
    source = partly_compiled(1)._orig_mod
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    tensors.write(source.state_dict(), tmp_path / "model.safetensors", True)
    with pytest.warns(UserWarning, match="another implementation wrote it|random generators"):
        load_accelerator_state(tmp_path, [plain], [], [], [], 0)
    assert torch.equal(plain[0][0].weight, source[0][0].weight)


# An index


class Line(nn.Sequential):
    """Multiplies by 2 and by 3; `shared` is the first weight again."""

    def __init__(self, values: tuple[float, float] = (2.0, 3.0)) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.add_module("shared", nn.Linear(1, 1, bias=False))
        self.shared.weight = self[0].weight
        with torch.no_grad():
            for layer, value in zip(self, values, strict=False):
                layer.weight.fill_(value)


def with_stale_copies(folder: Path, suffix: str) -> Path:
    """Write weights into two files, each with old values of what the index assigns to the other."""
    for name, index in (("a", 0), ("b", 1)):
        values = [-7.0, -7.0]
        values[index] = (2.0, 3.0)[index]
        state = Line((values[0], values[1])).state_dict()
        tensors.write(state, folder / f"{name}.{suffix}", safe_serialization=suffix == "safetensors")
    tensors.write({"2.weight": torch.ones(1, 1)}, folder / f"c.{suffix}", suffix == "safetensors")
    weight_map = {"0.weight": f"a.{suffix}", "1.weight": f"b.{suffix}"}
    if suffix == "bin":  # safetensors know the other names of a tied weight
        weight_map["shared.weight"] = "a.bin"
    path = folder / f"model.{suffix}.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def _load_plain(model: nn.Module, folder: Path) -> None:
    load_checkpoint_in_model(model, folder, strict=True)


def _load_to_memory(model: nn.Module, folder: Path) -> None:
    load_in_place(model.to("meta"), folder, {"": "cpu"})
    model.shared.weight = model[0].weight


def _load_offloaded(model: nn.Module, folder: Path) -> None:
    offload = folder / "offload"
    empty = copy.deepcopy(model).to("meta")
    load_checkpoint_in_model(empty, folder, {"": "disk"}, offload)
    load_offloaded_weights(model, json.loads((offload / "index.json").read_text()), offload)


def _load_where_it_is(model: nn.Module, folder: Path) -> None:
    empty, offload = copy.deepcopy(model).to("meta"), folder / "offload"
    index = load_in_place(empty, folder, {"": "disk"}, offload)
    weights = OffloadedWeightsLoader(save_folder=offload, index=index)
    model.load_state_dict({name: weights[name] for name in weights}, strict=False)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("load", [_load_plain, _load_to_memory, _load_offloaded, _load_where_it_is])
def test_an_index_decides_which_file_has_a_weight(
    tmp_path: Path, suffix: str, load: Callable[[nn.Module, Path], None]
) -> None:
    with_stale_copies(tmp_path, suffix)
    model = Line((5.0, 5.0))

    load(model, tmp_path)

    assert [layer.weight.item() for layer in model] == [2.0, 3.0, 2.0]
    assert model.shared.weight is model[0].weight


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_weight_that_the_index_does_not_list_is_missing(tmp_path: Path, suffix: str) -> None:
    with_stale_copies(tmp_path, suffix)
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))

    with pytest.raises(RuntimeError, match=r"in the model and not in the files: 2\.weight[.;]"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    with pytest.warns(UserWarning, match=r"in the model and not in the files: 2\.weight[.;]"):
        load_checkpoint_in_model(model, tmp_path)


def _load_on_ranks(folder: str) -> list[float]:
    model = Line((5.0, 5.0))
    load_checkpoint_in_model(model, folder, broadcast_from_rank0=True)
    return [layer.weight.item() for layer in model]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_decides_for_the_process_that_reads_for_all(world: Any, tmp_path: Path, suffix: str) -> None:
    with_stale_copies(tmp_path, suffix)
    assert world.run(_load_on_ranks, str(tmp_path), size=2) == [[2.0, 3.0, 2.0]] * 2


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_decides_in_a_checkpoint_folder(tmp_path: Path, suffix: str) -> None:
    index = with_stale_copies(tmp_path, suffix)
    if suffix == "bin":
        index.rename(tmp_path / "pytorch_model.bin.index.json")
    model = Line((5.0, 5.0))
    with pytest.warns(UserWarning, match="another implementation wrote it|random generators"):
        load_accelerator_state(tmp_path, [model], [], [], [], 0, strict=False)
    assert [layer.weight.item() for layer in model] == [2.0, 3.0, 2.0]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_what_was_put_on_a_parameter_stays(tmp_path: Path, device_map: Any) -> None:
    save_weights(nn.Linear(2, 2).state_dict(), tmp_path)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.weight.is_decayed = False
    load_checkpoint_in_model(model, tmp_path, device_map, tmp_path / "offloaded")
    assert model.weight.is_decayed is False
    assert type(model.weight) is nn.Parameter


# Weights of the disk that are read where they are


class Tied(nn.Module):
    """Two layers that share a weight, another one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.ones(3))


def tied(device: str = "cpu") -> nn.Module:
    model = Tied()
    with torch.no_grad():
        for index, value in enumerate(model.state_dict().values()):
            value.fill_(index + 1)
    return model.to(device) if device == "cpu" else _retied(model.to(device))


def _retied(model: nn.Module) -> nn.Module:
    model.b.weight = model.a.weight
    return model


def saved(folder: Path, suffix: str = "safetensors") -> Path:
    file = folder / f"model.{suffix}"
    if suffix == "safetensors":
        save_model(tied(), file)
    else:
        torch.save(tied().state_dict(), file)
    return file


def load_in_place(
    model: nn.Module,
    file: Path,
    device_map: Any,
    folder: Path | None = None,
    dtype: str | None = None,
    offload_buffers: bool = False,
) -> dict[str, dict[str, Any]]:
    """Load weights, leave those of the disk in safetensors, and return their entries."""
    placement = WeightPlacement.from_options(device_map, folder, dtype, offload_buffers, in_place=True)
    load_placed(model, file, placement, strict=False, full_state_dict=True, broadcast_from_rank0=False)
    return placement.index


DISK = {"": "cpu", "a": "disk", "b": "disk", "seen": "disk"}


def test_weights_of_the_disk_stay_in_their_file(tmp_path: Path) -> None:
    model = tied("meta")
    index = load_in_place(model, saved(tmp_path), DISK, offload_buffers=True)

    tied_names = {"a.weight", "b.weight"}
    assert set(index) - tied_names == {"a.bias", "b.bias", "seen"}
    assert tied_names & set(index)
    assert {entry["safetensors_file"] for entry in index.values()} == {str(tmp_path / "model.safetensors")}
    assert model.a.weight.is_meta
    assert model.b.weight is model.a.weight
    assert torch.equal(model.c.weight, tied().c.weight)
    weights = OffloadedWeightsLoader(index=index)
    assert all(torch.equal(weights[name], tied().state_dict()[name]) for name in index)
    assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]


def test_tied_weights_have_one_place_in_the_file_under_any_name(tmp_path: Path) -> None:
    index = load_in_place(tied("meta"), saved(tmp_path), DISK)
    loader = OffloadedWeightsLoader(index=index)
    there = [name for name in ("a.weight", "b.weight") if name in index]

    assert there
    assert len({index[name]["weight_name"] for name in there}) == 1
    assert torch.equal(loader[there[0]], tied().a.weight)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_of_two_values_of_a_tied_weight_the_last_counts_everywhere(
    tmp_path: Path, suffix: str, device: str
) -> None:
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    state["b.weight"] += 10
    file = tmp_path / f"model.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    model, folder = tied("meta"), tmp_path / "offloaded"
    index = load_in_place(model, file, {"": device}, folder)

    if device == "cpu":
        found = [model.a.weight, model.b.weight]
    else:
        loader = OffloadedWeightsLoader(save_folder=folder, index=index)
        found = [loader[name] for name in ("a.weight", "b.weight") if name in index]
    assert found
    assert all(torch.equal(value, state["b.weight"]) for value in found)
    written = {path.stem for path in folder.glob("*.dat")}
    assert written == (set(index) if device == "disk" and suffix == "bin" else set())


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_weight_that_would_have_no_values_is_named_before_anything_is_placed(
    tmp_path: Path, device: str
) -> None:
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    del state["c.bias"], state["a.weight"]  # the latter is there under its other name
    save_file(state, tmp_path / "model.safetensors")
    model = tied("meta")
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)

    with (
        pytest.warns(UserWarning, match=r"not in the files: c\.bias"),
        pytest.raises(ValueError, match=r"has no values for c\.bias, table, and Tied has them on the meta"),
    ):
        load_in_place(model, tmp_path, {"": device})

    assert all(value.is_meta for value in model.state_dict().values())


@pytest.mark.parametrize("map_of", [{"": "cpu", "a": "disk"}, {"": "cpu", "b": "disk"}])
def test_a_tied_weight_of_memory_and_disk_is_in_memory(tmp_path: Path, map_of: Any) -> None:
    model = tied("meta")
    index = load_in_place(model, saved(tmp_path), map_of)

    assert "a.weight" not in index
    assert "b.weight" not in index
    assert model.a.weight is model.b.weight
    assert torch.equal(model.a.weight, tied().a.weight)


def test_buffers_are_in_memory_unless_they_are_offloaded_too(tmp_path: Path) -> None:
    model = tied("meta")
    index = load_in_place(model, saved(tmp_path), {"": "disk"})

    assert "seen" not in index
    assert torch.equal(model.seen, tied().seen)


def test_another_dtype_is_written_where_there_is_a_folder_and_converted_where_not(tmp_path: Path) -> None:
    file, folder = saved(tmp_path), tmp_path / "offloaded"
    in_place = load_in_place(tied("meta"), file, {"": "disk"}, dtype="bfloat16")
    written = load_in_place(tied("meta"), file, {"": "disk"}, folder, dtype="bfloat16")

    assert all("safetensors_file" in entry for entry in in_place.values())
    assert not any("safetensors_file" in entry for entry in written.values())
    assert (folder / "c.weight.dat").stat().st_size == 4 * 4 * 2
    for loader in (OffloadedWeightsLoader(index=in_place), OffloadedWeightsLoader(save_folder=folder)):
        assert torch.equal(loader["c.weight"], tied().c.weight.bfloat16())


def test_torch_files_are_written_to_the_folder_and_need_one(tmp_path: Path) -> None:
    file, folder = saved(tmp_path, "bin"), tmp_path / "offloaded"
    model = tied("meta")
    with pytest.raises(
        ValueError, match=r"model\.bin is not a safetensors file, .*a\.weight .*offload_folder="
    ):
        load_in_place(model, file, {"": "disk"})
    assert all(value.is_meta for value in model.state_dict().values())

    index = load_in_place(model, file, {"": "disk"}, folder)
    loader = OffloadedWeightsLoader(save_folder=folder, index=index)
    assert all(torch.equal(loader[name], tied().state_dict()[name]) for name in index)
    assert {"c.weight", "c.bias"} <= set(index)


@pytest.mark.parametrize("wrong", ["a full disk", "a folder that cannot be made", "a damaged index"])
def test_a_folder_that_cannot_be_written_leaves_the_model_empty_and_the_folder_as_it_was(
    tmp_path: Path, wrong: str
) -> None:
    file, folder, model = saved(tmp_path, "bin"), tmp_path / "offloaded", tied("meta")
    parameters = list(model.parameters())
    if wrong == "a folder that cannot be made":
        folder.write_text("")
    elif wrong == "a damaged index":
        folder.mkdir()
        (folder / "index.json").write_text("[")
    before = sorted(tmp_path.rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = {
        "a full disk": r"the weight a\.weight \(64 bytes\) cannot be offloaded",
        "a folder that cannot be made": "the folder for offloaded weights cannot be made.*offloaded",
        "a damaged index": r"index\.json is not an index of offloaded weights",
    }[wrong]
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 if wrong == "a full disk" else soft, hard))
    try:
        with pytest.raises((OSError, CheckpointError), match=message):
            load_in_place(model, file, {"c": "cpu", "": "disk"}, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert all(value.is_meta for value in model.state_dict().values())
    assert [path for path in sorted(tmp_path.rglob("*")) if path != folder] == [
        p for p in before if p != folder
    ]


def test_a_second_file_that_is_damaged_leaves_the_model_empty(tmp_path: Path) -> None:
    save_weights(tied().state_dict(), tmp_path, max_shard_size=100)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    model = tied("meta")
    with pytest.raises(CheckpointError, match=re.escape(last.name)):
        load_in_place(model, tmp_path, {"": "cpu"})

    assert all(value.is_meta for value in model.state_dict().values())


def test_plain_weights_do_not_replace_quantized_ones(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    kind = type(model[0].weight)
    for device_map in (None, {"": "cpu"}):
        with pytest.raises(
            RuntimeError, match=rf"0\.weight is a plain tensor .* of the class {kind.__name__}"
        ):
            load_in_place(model, tmp_path, device_map)
        assert type(model[0].weight) is kind


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_in_place_take_no_memory(tmp_path: Path) -> None:
    size = 2**25
    model = nn.Linear(2**12, 2**11, bias=False)
    save_file({"weight": model.weight.detach()}, tmp_path / "model.safetensors")
    model.to("meta")
    gc.collect()
    before = private_bytes()
    index = load_in_place(model, tmp_path, {"": "disk"})
    weight = OffloadedWeightsLoader(index=index)["weight"]

    assert weight.nbytes == size
    assert weight.abs().sum() > 0
    assert private_bytes() - before < size / 4


def private_bytes() -> int:
    """The memory of this process that no file stands for."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"device_map": {"": "cpu"}}])
def test_attributes_of_plain_parameters_survive(tmp_path: Path, options: dict[str, Any]):
    model = torch.nn.Linear(2, 2)
    save_weights(model.state_dict(), tmp_path)
    empty = torch.nn.Linear(2, 2, device="meta")
    empty.weight.tag = "mine"

    load_checkpoint_in_model(empty, tmp_path, **options)

    assert not empty.weight.is_meta
    assert empty.weight.tag == "mine"
