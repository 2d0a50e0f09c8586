from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.weights.files import convert_file_size_to_int, find_weight_files, save_weights, split_by_size
from accel_ckpt.weights.load import load_checkpoint_in_model, load_state_dict
from accel_ckpt.weights.offload import OffloadedWeightsLoader


class Net(nn.Module):
    """Three layers, of which two share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.full((3,), 2.0))


def same(model: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("10GB", 10**10),
        ("1MiB", 2**20),
        ("1.5 GB", 1_500_000_000),
        ("2gib", 2**31 // 8),
        ("3Kb", 375),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "1 parsec"])
def test_what_is_no_size_is_reported(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="such as '5GB'"):
        convert_file_size_to_int(text)
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        save_weights({}, tmp_path, 0)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_no_file_is_too_large_and_the_order_stays(sizes: list[int], limit: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    parts = split_by_size(named, limit)

    assert [name for part in parts for name in part] == list(named)
    for part in parts:
        assert sum(named[name] for name in part) <= limit or len(part) == 1


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", 400])
def test_what_is_saved_loads(tmp_path: Path, safe: bool, limit: Any) -> None:
    model = Net()
    files = save_weights(model.state_dict(), tmp_path, limit, safe)
    assert sorted(files) == sorted(os.listdir(tmp_path))
    if limit == 400:
        stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
        parts = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
        assert files == [*parts, f"{stem}.{suffix}.index.json"]
        index = json.loads((tmp_path / files[-1]).read_text())
        assert index["metadata"]["total_size"] == 620
        names = set(model.state_dict()) - ({"b.weight"} if safe else set())
        assert set(index["weight_map"]) == names
        assert set(index["weight_map"].values()) == set(parts)
    for source in (tmp_path, tmp_path / files[-1]):
        other = Net()
        load_checkpoint_in_model(other, source, strict=True)
        assert same(model, other)
        assert other.b.weight is other.a.weight


def test_other_tools_open_the_files(tmp_path: Path) -> None:
    model = Net()
    for file in save_weights(model.state_dict(), tmp_path / "safe", 400)[:-1]:
        for name, value in safetensors.torch.load_file(tmp_path / "safe" / file).items():
            assert torch.equal(value, model.state_dict()[name])
    for file in save_weights(model.state_dict(), tmp_path / "torch", 400, False)[:-1]:
        for name, value in torch.load(tmp_path / "torch" / file, weights_only=True).items():
            assert torch.equal(value, model.state_dict()[name])


def test_a_view_is_written_without_the_memory_around_it(tmp_path: Path) -> None:
    save_weights({"x": torch.zeros(100_000)[:10]}, tmp_path, safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 10_000


def test_an_earlier_save_goes_and_other_files_stay(tmp_path: Path) -> None:
    model = Net()
    (tmp_path / "config.json").write_text("{}")
    save_weights(model.state_dict(), tmp_path, 300)
    save_weights(model.state_dict(), tmp_path, 400)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    save_weights(model.state_dict(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    with pytest.warns(UserWarning, match=r"has model\.safetensors of a previous save"):
        save_weights(model.state_dict(), tmp_path, safe_serialization=False)


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    save_weights(model.state_dict(), tmp_path, 400)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    written: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        written.append(args)
        if len(written) == 2:
            raise OSError("the disk is full")

    monkeypatch.setattr("accel_ckpt.weights.files.flush", fail)
    with pytest.raises(OSError, match="full"):
        save_weights(Net().state_dict(), tmp_path, 400)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# Loading


def test_a_folder_of_another_implementation_loads(tmp_path: Path) -> None:
    # Written with torch alone, under the documented names.
    model = Net()
    state = model.state_dict()
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    other = Net()
    load_checkpoint_in_model(other, tmp_path, strict=True)

    assert same(model, other)


def test_differing_names_are_reported_or_rejected(tmp_path: Path) -> None:
    state = Net().state_dict()
    del state["c.bias"]
    state["d"] = torch.ones(1)
    save_weights(state, tmp_path)
    with pytest.warns(UserWarning, match=r"weights; in the model and not in the files: c\.bias\."):
        load_checkpoint_in_model(Net(), tmp_path)
    message = r"in the model and not in the files: c\.bias; in the files and not in the model: d\."
    with pytest.raises(RuntimeError, match=message):
        load_checkpoint_in_model(Net(), tmp_path, strict=True)
    save_weights({"a.weight": torch.ones(2)}, tmp_path)
    with pytest.raises(RuntimeError, match=r"a\.weight has the shape \[2\] in .*tensors and \[8, 8\] in Net"):
        load_checkpoint_in_model(Net(), tmp_path)


def test_a_meta_model_gets_its_weights_and_keeps_its_ties(tmp_path: Path) -> None:
    model = Net()
    save_weights(model.state_dict(), tmp_path, 400)
    with torch.device("meta"):
        empty = Net()
    load_checkpoint_in_model(empty, tmp_path, dtype="bfloat16", keep_in_fp32_modules=["c"])

    assert empty.b.weight is empty.a.weight
    assert empty.a.weight.dtype is torch.bfloat16
    assert empty.c.weight.dtype is torch.float32
    assert torch.equal(empty.c.weight, model.c.weight)
    assert torch.equal(empty.a.weight, model.a.weight.bfloat16())
    assert not empty.seen.is_meta


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("offload_state_dict", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_parts_go_to_the_disk(
    tmp_path: Path, offload_buffers: bool, offload_state_dict: bool, safe: bool
) -> None:
    model = Net()
    save_weights(model.state_dict(), tmp_path / "w", safe_serialization=safe)
    with torch.device("meta"):
        other = Net()
    load_checkpoint_in_model(
        other,
        tmp_path / "w",
        {"a": "cpu", "b": "cpu", "c": "disk", "seen": "disk"},
        tmp_path / "off",
        offload_buffers=offload_buffers,
        offload_state_dict=offload_state_dict,
    )
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "off")

    assert set(loader) == {"c.weight", "c.bias", *(["seen"] if offload_buffers else [])}
    assert torch.equal(loader["c.weight"], model.c.weight)
    assert other.c.weight.is_meta
    assert other.seen.is_meta == offload_buffers
    assert torch.equal(other.a.weight, model.a.weight)
    assert other.a.weight.requires_grad
    load_checkpoint_in_model(other, tmp_path / "w", {"": "cpu"})
    assert same(model, other)


def test_device_maps(tmp_path: Path) -> None:
    model = Net()
    save_weights(model.state_dict(), tmp_path)
    state = load_state_dict(tmp_path / "model.safetensors", {"": "cpu", "c": "meta"})
    assert state["c.bias"].is_meta
    assert not state["a.bias"].is_meta
    with pytest.raises(ValueError, match=r"has no entry for b\.bias\. It has: 'a'"):
        load_checkpoint_in_model(model, tmp_path, {"a": "cpu"})
    with pytest.raises(ValueError, match="offload_folder="):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"})
    with pytest.raises(ValueError, match="not 'float99'"):
        load_checkpoint_in_model(model, tmp_path, dtype="float99")
    with pytest.raises(TypeError, match=r"must be a dict of devices by name of a module.*not 'auto'"):
        load_checkpoint_in_model(model, tmp_path, "auto")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="broadcast_from_rank0 is ignored"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, broadcast_from_rank0=True)
    load_checkpoint_in_model(model, tmp_path, broadcast_from_rank0=True, full_state_dict=False)
    with pytest.raises(NotImplementedError, match=r"offload_8bit_bnb.*load_and_quantize_model"):
        load_checkpoint_in_model(model, tmp_path, offload_8bit_bnb=True)


def _broadcast(folder: str) -> list[bool]:
    model = Net()
    torch.manual_seed(torch.distributed.get_rank() + 1)
    other = Net()
    source = folder if torch.distributed.get_rank() == 0 else f"{folder}/not_on_this_machine"
    load_checkpoint_in_model(other, source, broadcast_from_rank0=True)
    load_checkpoint_in_model(model, folder)
    return [same(model, other)]


def test_one_process_reads_for_all(world: Any, tmp_path: Path) -> None:
    save_weights(Net().state_dict(), tmp_path, 400)
    assert world.run(_broadcast, str(tmp_path), size=2, timeout_s=100) == [[True]] * 2


# Files that are not to be read


def index_of(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))


@pytest.mark.parametrize(
    "name", ["../w.safetensors", "/w.safetensors", "a/../w.safetensors", "./w", "a\\w", "C:w", ""]
)
def test_an_index_cannot_point_outside(tmp_path: Path, name: str) -> None:
    index_of(tmp_path, name)
    with pytest.raises(CorruptCheckpointError, match=r"index\.json names the file .*, which is not inside"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("kind", ["link", "link on the way", "pipe", "device", "folder"])
def test_an_index_names_plain_files(tmp_path: Path, kind: str) -> None:
    folder, outside = tmp_path / "w", tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    folder.mkdir()
    safetensors.torch.save_file({"x": torch.ones(1)}, outside / "x.safetensors")
    index_of(folder, "sub/x.safetensors" if kind == "link on the way" else "x.safetensors")
    file = folder / "x.safetensors"
    if kind == "link":
        file.symlink_to(outside / "x.safetensors")
    elif kind == "link on the way":
        (folder / "sub").symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        try:
            os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making a device needs a privilege")
    else:
        file.mkdir()
    with pytest.raises(CorruptCheckpointError, match=r"is a (symbolic link|pipe|device|folder)"):
        load_checkpoint_in_model(nn.Linear(1, 1), folder)


def test_links_inside_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, blobs / "hash")
    (snapshot / "x.safetensors").symlink_to("../../blobs/hash")
    index_of(snapshot, "x.safetensors")
    model = nn.Linear(1, 1)
    load_checkpoint_in_model(model, snapshot, strict=True)
    assert model.weight.item() == 1

    (snapshot / "x.safetensors").unlink()
    (snapshot / "x.safetensors").symlink_to("../../../hash")
    with pytest.raises(CorruptCheckpointError, match="symbolic link"):
        find_weight_files(snapshot)


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, (Payload.place,)

    place = ""


def test_no_file_of_weights_runs_code(tmp_path: Path) -> None:
    Payload.place = str(tmp_path / "ran")
    torch.save({"weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no .*none"):
        find_weight_files(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors.* it has notes\.txt"):
        find_weight_files(tmp_path)
    index_of(tmp_path, "x.safetensors")
    with pytest.raises(FileNotFoundError, match=r"index\.json names x\.safetensors"):
        find_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CorruptCheckpointError, match="is not an index of weights"):
        find_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "a.index.json")
    (tmp_path / "b.index.json").touch()
    with pytest.raises(ValueError, match=r"several indexes: a\.index\.json, b\.index\.json"):
        find_weight_files(tmp_path)
