"""Several models and one folder: none computes with the weights of another."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import disk_offload, dispatch_model, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel.hooks import remove_hook_from_submodules
from accel.utils import BnbQuantizationConfig, load_and_quantize_model, offload_state_dict

X = torch.ones(1, 4)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()


def saved(model: nn.Module, folder: Path) -> Path:
    file = folder.with_suffix(".bin")
    torch.save(model.state_dict(), file)
    return file


def quantized(model: nn.Module, folder: Path) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    return load_and_quantize_model(
        model, config, saved(model, folder), device_map={"": "disk"}, offload_folder=folder
    )


WAYS: dict[str, Callable[[nn.Module, Path], object]] = {
    "disk_offload": disk_offload,
    "dispatch_model": lambda model, folder: dispatch_model(
        model, {"0": "cpu", "1": "disk"}, offload_dir=folder
    ),
    "load_checkpoint_and_dispatch": lambda model, folder: load_checkpoint_and_dispatch(
        model, saved(model, folder), {"": "disk"}, offload_folder=folder
    ),
    "load_checkpoint_in_model": lambda model, folder: load_checkpoint_in_model(
        model, saved(model, folder), {"": "disk"}, folder
    ),
    "load_and_quantize_model": quantized,
    "offload_state_dict": lambda model, folder: offload_state_dict(folder, model.state_dict()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_a_model_reads_is_not_written_by_another(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "offload"
    first = disk_offload(make(0), folder)
    expected, files = make(0)(X), sorted(path.name for path in folder.iterdir())
    second = make(1)

    named = re.escape(str(folder))
    with pytest.raises(ValueError, match=rf"^{named} has weights of a model that is in use.* its own folder"):
        WAYS[way](second, folder)

    assert torch.equal(first(X), expected)
    assert sorted(path.name for path in folder.iterdir()) == files
    del first
    WAYS[way](second, folder)  # nobody reads the earlier weights any more


def test_a_model_that_cannot_be_offloaded_is_as_before(tmp_path: Path) -> None:
    first, second = disk_offload(make(0), tmp_path), make(1)
    for offload in (WAYS["disk_offload"], WAYS["dispatch_model"]):
        with pytest.raises(ValueError, match="Give each model its own folder"):
            offload(second, tmp_path)

    assert torch.equal(second(X), make(1)(X))
    assert torch.equal(first(X), make(0)(X))


def test_a_model_may_be_offloaded_again_into_its_own_folder(tmp_path: Path) -> None:
    model, expected = make(0), make(0)(X)
    for way in ("dispatch_model", "load_checkpoint_and_dispatch", "dispatch_model"):
        if way == "load_checkpoint_and_dispatch":
            saved(make(0), tmp_path)
            load_checkpoint_and_dispatch(
                model, tmp_path.with_suffix(".bin"), {"": "disk"}, offload_folder=tmp_path
            )
        else:
            WAYS[way](model, tmp_path)
        assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)

    other = disk_offload(make(1), tmp_path)  # the first reads it no more
    assert torch.equal(other(X), make(1)(X))


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_read_the_folder_too(twin: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = disk_offload(make(0), tmp_path)
    other = twin(model)
    del model

    with pytest.raises(ValueError, match="in use"):
        disk_offload(make(1), tmp_path)
    assert torch.equal(other(X), make(0)(X))


def test_weights_of_other_names_may_share_the_folder(tmp_path: Path) -> None:
    first = disk_offload(nn.ModuleDict({"encoder": make(0)}), tmp_path)
    second = disk_offload(nn.ModuleDict({"decoder": make(1)}), tmp_path)

    assert torch.equal(first["encoder"](X), make(0)(X))
    assert torch.equal(second["decoder"](X), make(1)(X))


def test_a_model_that_waits_for_the_collector_reads_no_more(tmp_path: Path) -> None:
    first = disk_offload(make(0), tmp_path)
    first.itself = [first]
    del first

    disk_offload(make(1), tmp_path)
