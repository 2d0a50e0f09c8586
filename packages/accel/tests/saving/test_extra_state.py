"""What modules keep next to tensors (`get_extra_state`) is saved and restored with the weights."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel.accelerator import Accelerator
from accel.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


class Kind(enum.Enum):
    ONE = 1


class Noted(torch.nn.Linear):
    """A layer with a state of any type."""

    note: Any = "new"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def make(**options: Any) -> tuple[Accelerator, torch.nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Sequential(Noted(2, 2), torch.nn.Linear(2, 1), Noted(1, 1))
    model[1].requires_grad_(False)
    model = accelerator.prepare(model)
    return accelerator, model, accelerator.unwrap_model(model)


NOTES = [{"scale": torch.ones(2), "steps": [1, {"a": None}]}, None, 3, (Kind.ONE, Path("a")), torch.ones(3)]


@pytest.mark.parametrize("note", NOTES, ids=repr)
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_it_comes_back_as_it_was(tmp_path: Path, note: Any, safe: bool, incremental: bool, blocking: bool):
    project = ProjectConfiguration(str(tmp_path), incremental_saves=incremental)
    accelerator, _, inner = make(project_config=project)
    inner[0].note = note
    folder = accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe, blocking=blocking)
    again, _, other = make()
    again.load_state(folder)

    assert repr(other[0].note) == repr(note)
    assert other[2].note == "new"
    assert torch.equal(other[0].weight, inner[0].weight)


@pytest.mark.parametrize("note", NOTES, ids=repr)
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("max_shard_size", ["10GB", 8])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"0": "disk", "1": "cpu", "2": "cpu"}])
def test_save_model_keeps_it(tmp_path: Path, note: Any, safe: bool, max_shard_size: Any, device_map: Any):
    accelerator, model, inner = make()
    inner[0].note = note
    accelerator.save_model(model, tmp_path, max_shard_size, safe)
    _, _, other = make()
    load_checkpoint_and_dispatch(other, tmp_path, device_map, offload_folder=tmp_path / "disk", strict=True)

    assert repr(other[0].note) == repr(note)
    assert other[2].note == "new"
    x = torch.ones(1, 2)
    assert torch.equal(other(x), inner(x))


def test_save_model_leaves_none_of_the_model_before(tmp_path: Path):
    accelerator, model, _ = make()
    accelerator.save_model(model, tmp_path)
    accelerator.save_model(torch.nn.Linear(1, 1), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_no_load_would_take_is_named(tmp_path: Path):
    accelerator, _, inner = make()
    inner[2].note = {"a": accelerator}
    with pytest.raises(
        ValueError, match=r"model 0 cannot be saved: its state\['2\._extra_state'\]\['a'\] is of type"
    ):
        accelerator.save_state(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
    with pytest.raises(ValueError, match=r"its state\['2\._extra_state'\]\['a'\] is of type"):
        accelerator.save_model(inner, tmp_path / "weights")


def test_where_it_is_missing_the_load_says_so(tmp_path: Path):
    folder = Accelerator(cpu=True)
    model = folder.prepare(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    )
    saved = folder.save_state(str(tmp_path / "state"))
    accelerator, _, inner = make()
    with pytest.raises(RuntimeError, match=r"the file has no 0\._extra_state for model 0"):
        accelerator.load_state(saved)
    with pytest.warns(UserWarning, match=r"the file has no 0\._extra_state"):
        accelerator.load_state(saved, strict=False)
    assert inner[0].note == "new"
    assert torch.equal(inner[0].weight, model[0].weight)


def sharded(folder: str, kind: str) -> Any:
    def plugin() -> Any:
        return FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)

    accelerator, _, inner = make(fsdp_plugin=plugin()) if kind != "ddp" else make()
    inner[0].note = {"a": {"b": 5}, "c": [1, Kind.ONE]}
    accelerator.save_state(folder)
    again, _, other = make(fsdp_plugin=plugin()) if kind != "ddp" else make()
    again.load_state(folder)
    return other[0].note, other[2].note


def whole(folder: str) -> Any:
    accelerator, model, inner = make(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    inner[0].note = {"a": 5}
    accelerator.save_model(model, folder)
    notes = []
    for broadcast in (True, False):
        inner[0].note = None
        load_checkpoint_in_model(model, folder, broadcast_from_rank0=broadcast)
        notes.append(inner[0].note)
    return notes


def test_save_model_keeps_it_where_models_are_sharded(world, tmp_path: Path):
    assert world.run(whole, str(tmp_path), size=2, timeout_s=100) == [[{"a": 5}] * 2] * 2


@pytest.mark.parametrize("kind", ["ddp", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_it_comes_back_on_several_processes(world, tmp_path: Path, kind: str):
    note = {"a": {"b": 5}, "c": [1, Kind.ONE]}
    assert world.run(sharded, str(tmp_path / "state"), kind, size=2, timeout_s=100) == [(note, "new")] * 2
