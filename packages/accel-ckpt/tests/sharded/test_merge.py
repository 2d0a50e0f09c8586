from __future__ import annotations

import argparse
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from accel_ckpt.errors import CheckpointError, CorruptCheckpointError
from accel_ckpt.sharded import dcp_reader, merge_command
from accel_ckpt.sharded.merge import _put, merge_fsdp_weights
from accel_ckpt.sharded.save_load import save_sharded_state


def save(folder: str) -> dict[str, torch.Tensor]:
    """Save a sharded model; return its full weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16())
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    if dist.is_initialized():
        fully_shard(model[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model[2], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    save_sharded_state(folder, [model])
    return whole


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("part", ["", "pytorch_model_fsdp_0"])
def test_the_file_has_the_full_weights(world: Any, tmp_path: Path, size: int, part: str) -> None:
    whole = world.run(save, str(tmp_path / "c"), size=size, timeout_s=100)[0]
    merge_fsdp_weights(tmp_path / "c" / part, tmp_path / "out")
    merge_fsdp_weights(
        tmp_path / "c" / part, tmp_path / "out", safe_serialization=False, remove_checkpoint_dir=True
    )

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "pytorch_model.bin",
    ]
    for merged in (
        safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"),
        torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True),
    ):
        assert set(merged) == set(whole)
        for name, value in whole.items():
            assert merged[name].dtype == value.dtype
            assert torch.equal(merged[name], value), name
    assert not (tmp_path / "c" / "pytorch_model_fsdp_0").exists()


def save_columns(folder: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(3, 5, 4)
    state = {f"by_{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in range(3)}
    torch_dcp.save({"model": state}, checkpoint_id=folder)
    return [whole]


def test_pieces_of_any_dimension_come_to_their_places(world: Any, tmp_path: Path) -> None:
    whole = world.run(save_columns, str(tmp_path / "c"), size=3, timeout_s=100)[0][0]
    merge_fsdp_weights(tmp_path / "c", tmp_path)
    merged = safetensors.torch.load_file(tmp_path / "model.safetensors")

    assert all(torch.equal(merged[f"by_{dim}"], whole) for dim in range(3))


@given(st.data())
def test_a_piece_fills_its_place_and_no_other(tmp_path_factory: Any, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    begin = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    end = tuple(data.draw(st.integers(start, size)) for start, size in zip(begin, shape, strict=True))
    part = tuple(slice(*span) for span in zip(begin, end, strict=True))
    expected = torch.zeros(shape, dtype=torch.int16)
    expected[part] = torch.arange(1, expected[part].numel() + 1, dtype=torch.int16).reshape(
        expected[part].shape
    )
    path = tmp_path_factory.mktemp("put") / "file"
    with open(path, "wb+", buffering=0) as file:
        file.truncate(6 + math.prod(shape) * 2)
        _put(file.fileno(), 6, expected[part].clone(), begin, shape)
    written = torch.frombuffer(bytearray(path.read_bytes()[6:]), dtype=torch.int16).reshape(shape)

    assert torch.equal(written, expected)


def save_alone(state: dict[str, Any], folder: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_what_is_wrong_is_reported_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"There is no folder .*/none\. Name pytorch_model_fsdp_0, or"
    ):
        merge_fsdp_weights(tmp_path / "none", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no sharded weights \(\.metadata\).* There is: nothing"):
        merge_fsdp_weights(tmp_path / "empty", tmp_path / "out")
    save(str(tmp_path / "c"))
    file = tmp_path / "c" / "pytorch_model_fsdp_0" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp differs"):
        merge_fsdp_weights(tmp_path / "c", tmp_path / "out", remove_checkpoint_dir=True)
    assert file.exists()
    (tmp_path / "c" / "accel_manifest.json").unlink()
    file.write_bytes(bytes(255 - byte for byte in raw))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is damaged at byte"):
        merge_fsdp_weights(tmp_path / "c", tmp_path / "out")
    file.write_bytes(raw[: len(raw) // 3])
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp is cut off: it has \d+ bytes"):
        merge_fsdp_weights(tmp_path / "c", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    save_alone({"z": torch.ones(1, dtype=torch.complex128)}, tmp_path / "z")
    with pytest.raises(CheckpointError, match=r"z in .* is torch\.complex128"):
        merge_fsdp_weights(tmp_path / "z", tmp_path / "out")


def test_pieces_that_do_not_make_up_the_whole_are_rejected(tmp_path: Path) -> None:
    save_alone({"w": torch.ones(4, 2)}, tmp_path / "c")
    index = tmp_path / "c" / dcp_reader.METADATA
    good = index.read_bytes()
    for size, offset in (([3, 2], [0, 0]), ([4, 2], [1, 0])):  # a row too few, and one beyond the end
        metadata = pickle.loads(good)
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        ((place, info),) = metadata.storage_data.items()
        chunk.sizes, chunk.offsets = torch.Size(size), torch.Size(offset)
        metadata.storage_data = {replace(place, offset=chunk.offsets): info}
        index.write_bytes(pickle.dumps(metadata))
        with pytest.raises(
            CorruptCheckpointError, match=r"the pieces of w do not make up its shape \[4, 2\]"
        ):
            merge_fsdp_weights(tmp_path / "c", tmp_path / "out")


def test_what_is_no_tensor_is_left_out_and_reported(tmp_path: Path) -> None:
    save_alone({"w": torch.ones(2), "n": 3}, tmp_path / "c")
    with pytest.warns(UserWarning, match="omitted: n"):
        merge_fsdp_weights(tmp_path / "c", tmp_path)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["w"]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path / "c"))
    parser = argparse.ArgumentParser()
    merge_command.register(parser.add_subparsers())
    args = parser.parse_args(["merge-weights", str(tmp_path / "c"), str(tmp_path), "--unsafe-serialization"])
    assert args.func(args) == 0
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'pytorch_model.bin'} ({size:,} bytes).\n"
    monkeypatch.setattr("sys.argv", ["accel-merge-weights", str(tmp_path / "none"), str(tmp_path)])
    assert merge_command.main() == 2
    assert capsys.readouterr().err.startswith("accel merge-weights: error: There is no folder")
    monkeypatch.setattr("sys.argv", ["accel-merge-weights", "--nope"])
    with pytest.raises(SystemExit, match="2"):
        merge_command.main()
    assert "\naccel merge-weights: error: " in capsys.readouterr().err
