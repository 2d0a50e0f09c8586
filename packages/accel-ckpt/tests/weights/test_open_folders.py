from __future__ import annotations

import os
from collections import ChainMap
from pathlib import Path

import pytest
import torch

from accel_ckpt.weights.offload import OffloadedWeightsLoader, PrefixedDataset, offload_state_dict
from accel_ckpt.weights.open_folders import check_not_in_use, open_folders_of


class Hook:
    def __init__(self, weights_map: object) -> None:
        self.weights_map = weights_map


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    offload_state_dict(tmp_path / "weights", {"a": torch.ones(2), "b": torch.ones(2)})
    return tmp_path / "weights"


def test_weights_that_are_read_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = OffloadedWeightsLoader(save_folder=folder)

    with pytest.raises(ValueError, match=r"has weights of a model that is in use.* once a, b are replaced"):
        check_not_in_use(folder, {"a", "b", "c"})
    check_not_in_use(folder, {"c"})
    check_not_in_use(folder.parent / "other", {"a"})
    check_not_in_use(folder, {"a"}, {id(loader)})
    os.symlink(folder, folder.parent / "link")
    monkeypatch.chdir(folder)
    for same in (folder.parent / "link", "."):
        with pytest.raises(ValueError, match="in use"):
            check_not_in_use(same, {"a"})
    del loader
    check_not_in_use(folder, {"a"})


def test_only_what_is_read_from_the_folder_counts(folder: Path, tmp_path: Path) -> None:
    index = {
        "alias": {"weight_name": "a", "dtype": "float32", "shape": [2]},
        "b": {"safetensors_file": str(tmp_path / "file.safetensors"), "weight_name": "b"},
    }
    loader = OffloadedWeightsLoader(save_folder=folder, index=index)

    check_not_in_use(folder, {"alias", "b"})
    with pytest.raises(ValueError, match="once a are replaced"):
        check_not_in_use(folder, {"a", "b"})
    del loader


def test_the_readers_of_a_model_are_found_wherever_its_hooks_have_them(folder: Path) -> None:
    loaders = [OffloadedWeightsLoader(save_folder=folder) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.ReLU())
    vars(model[0])["_hf_hook"] = Hook(PrefixedDataset(loaders[0], "a."))
    both = type("Several", (), {"hooks": (Hook(None), Hook(ChainMap({}, PrefixedDataset(loaders[1], ""))))})
    vars(model[1])["_hf_hook"] = both()

    assert {id(loader) for loader in loaders} & open_folders_of(model) == {
        id(loader) for loader in loaders[:2]
    }
