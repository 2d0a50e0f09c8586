"""Files of models with frozen weights, where these have their own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from accel_ckpt import checkpoint, file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.folder import manifest
from accel_ckpt.training_state.frozen_weights import frozen_names, split_into_files
from accel_ckpt.weights.files import find_weight_files
from accel_ckpt.weights.load import load_checkpoint_in_model


class Adapted(nn.Module):
    """A frozen embedding that is tied to the head, a norm with buffers, and an adapter that trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.adapter = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.embed.requires_grad_(False)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]


FROZEN = {"embed.weight", "head.weight"}


def same(first: nn.Module, second: nn.Module) -> bool:
    expected, found = first.state_dict(), second.state_dict()
    return expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_frozen_weights_have_a_file_of_their_own(index: int, safe: bool) -> None:
    model = Adapted(0)
    assert frozen_names(model) == FROZEN
    parts, indexes = split_into_files(model.state_dict(), index, FROZEN, safe)
    stem = ("model" if safe else "pytorch_model") + ("_1" if index else "")
    suffix = "safetensors" if safe else "bin"
    first, second = (f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2))
    assert [*parts] == [first, second]
    assert parts[first].keys() == FROZEN
    assert {**parts[first], **parts[second]}.keys() == model.state_dict().keys()
    assert [*indexes] == [f"{stem}.{suffix}.index.json"]
    described = json.loads(indexes[f"{stem}.{suffix}.index.json"])
    kept = model.state_dict().keys() - ({"head.weight"} if safe else set())
    assert described["weight_map"] == {name: first if name in FROZEN else second for name in kept}
    assert described["metadata"] == {"total_size": 4 * (24 + 16 + 20) + 8}
    assert all(file_names.role_of(name) == "model" for name in (*parts, *indexes))


@pytest.mark.parametrize(("index", "name"), [(0, "pytorch_model_fsdp.bin"), (1, "pytorch_model_fsdp_1.bin")])
def test_full_weights_of_fsdp_have_their_documented_name(index: int, name: str) -> None:
    state = Adapted(0).state_dict()
    assert split_into_files(state, index, (), True, gathered=True) == ({name: state}, {})


@pytest.mark.parametrize("frozen", [frozenset(), frozenset(Adapted(0).state_dict()), {"another"}])
def test_where_all_or_none_are_frozen_there_is_one_file(frozen: frozenset[str]) -> None:
    state = Adapted(0).state_dict()
    assert split_into_files(state, 0, frozen, True) == ({"model.safetensors": state}, {})


def test_sharded_models_are_loaded_strictly_and_frozen_files_are_linked(tmp_path: Path) -> None:
    adapted = [Adapted(1), Adapted(2)]
    models = [*adapted, nn.Linear(2, 2).requires_grad_(False)]
    checkpoint.save(tmp_path / "checkpoint_0", model=models, incremental=True)
    with torch.no_grad():
        for model in adapted:
            model.adapter.weight.add_(1)
    checkpoint.save(tmp_path / "checkpoint_1", model=models, incremental=True)
    described = manifest.read(tmp_path / "checkpoint_1")
    assert described is not None
    same_file = {
        name
        for name in described.paths()
        if (tmp_path / "checkpoint_0" / name).samefile(tmp_path / "checkpoint_1" / name)
    }
    assert {name for name in same_file if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors",
        "model_1-00001-of-00002.safetensors",
        "model_2.safetensors",
    }
    other = Adapted(3)
    again = [other, Adapted(4), nn.Linear(2, 2)]
    checkpoint.load(tmp_path / "checkpoint_1", model=again, strict=True)
    assert all(map(same, models, again))
    assert other.embed.weight is other.head.weight
    with pytest.raises(CheckpointError, match=r"model_1-0000\d-of-00002\.safetensors is not loaded"):
        checkpoint.load(tmp_path / "checkpoint_1", model=again[:1], strict=True)


def test_other_readers_of_an_index_find_every_weight(tmp_path: Path) -> None:
    model, again = Adapted(1), Adapted(2)
    checkpoint.save(tmp_path / "c", model=model, incremental=True)
    load_checkpoint_in_model(again, tmp_path / "c", strict=True)
    assert same(model, again)
    names = set()
    for weights in find_weight_files(tmp_path / "c"):
        with safe_open(weights.path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            names |= set(file.keys())
    assert names == model.state_dict().keys() - {"head.weight"}


def test_a_save_that_is_not_incremental_has_the_usual_files(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", model=Adapted(1))
    assert manifest.files_in(tmp_path / "c") == ["model.safetensors", "random_states_0.pkl"]
