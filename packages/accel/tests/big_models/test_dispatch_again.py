"""Loading other weights into a model that is dispatched, and checkpoints that change under one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_ckpt.errors import CheckpointError
from accel_ckpt.weights.files import save_weights
from accel_ckpt.weights.offload import OffloadedWeightsLoader

X = torch.ones(2, 8)
MAPS = {
    "memory": {"": "cpu"},
    "both": {"0": "cpu", "1": "disk", "2": "cpu", "3": "disk"},
    "disk": {"": "disk"},
}


def make(seed: int) -> nn.Module:
    """Layers of which the first and the last share their weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
    model[3].weight = model[0].weight
    return model


def dispatched(folder: Path, device_map: dict[str, str], **options: Any) -> nn.Module:
    save_weights(make(0).state_dict(), folder)
    with init_empty_weights():
        model = make(0)
    model[3].weight = model[0].weight
    model = load_checkpoint_and_dispatch(model, folder, device_map, **options)
    assert_computes(model, make(0))
    return model


@torch.no_grad()
def assert_computes(model: nn.Module, plain: nn.Module) -> None:
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_other_weights_are_loaded_into_a_dispatched_model(first: str, second: str, tmp_path: Path):
    model = dispatched(tmp_path / "first", MAPS[first])
    mine = ModelHook()
    add_hook_to_module(model[1], mine, append=True)
    save_weights(make(1).state_dict(), tmp_path / "second")

    model = load_checkpoint_and_dispatch(model, tmp_path / "second", MAPS[second])

    assert model[0].weight is model[3].weight
    assert_computes(model, make(1))
    hook = model[1]._hf_hook
    assert mine in getattr(hook, "hooks", (hook,))
    remove_hook_from_submodules(model)
    assert not any("_hf_hook" in vars(module) for module in model.modules())


@pytest.mark.parametrize("first", MAPS)
@pytest.mark.parametrize("second", MAPS)
def test_weights_that_the_second_checkpoint_lacks_stay(first: str, second: str, tmp_path: Path):
    model = dispatched(tmp_path / "first", MAPS[first])
    state = {name: value for name, value in make(1).state_dict().items() if name.startswith("2.")}
    save_weights(state, tmp_path / "second")
    expected = make(0)
    expected.load_state_dict(state, strict=False)

    with pytest.warns(UserWarning, match=r"not in the files: 0\.bias"):
        model = load_checkpoint_and_dispatch(
            model, tmp_path / "second", MAPS[second], offload_folder=tmp_path / "offloaded"
        )

    assert_computes(model, expected)


OFFLOADED = {
    "memory": lambda folder: cpu_offload(make(0), "cpu"),
    "disk": lambda folder: disk_offload(make(0), folder, "cpu"),
    "dispatched": lambda folder: dispatch_model(make(0), MAPS["both"], "cpu", offload_dir=folder),
    "dispatched to memory": lambda folder: dispatch_model(make(0), MAPS["memory"], force_hooks=True),
    "in place": lambda folder: dispatched(folder, MAPS["both"]),
    "in place, with a folder": lambda folder: dispatched(folder, MAPS["both"], offload_folder=folder / "off"),
}


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
@pytest.mark.parametrize("kind", OFFLOADED)
def test_loading_replaces_what_is_offloaded(kind: str, load: Any, safe: bool, tmp_path: Path):
    model = OFFLOADED[kind](tmp_path / "first")
    devices = [parameter.device for parameter in model.parameters()]
    save_weights(model.state_dict(), tmp_path / "own", safe_serialization=safe)
    save_weights(make(1).state_dict(), tmp_path / "second", max_shard_size=300, safe_serialization=safe)
    first = {path: path.read_bytes() for path in (tmp_path / "first").glob("*.safetensors")}

    for name, seed in (("second", 1), ("own", 0), ("second", 1)):
        load(model, tmp_path / name)

        assert_computes(model, make(seed))
        expected = make(seed).state_dict()
        assert all(torch.equal(model.state_dict()[key], value) for key, value in expected.items())
        assert [parameter.device for parameter in model.parameters()] == devices
    assert all(path.read_bytes() == content for path, content in first.items())
    remove_hook_from_submodules(model)
    if kind in ("memory", "disk", "dispatched"):
        assert_computes(model, make(1))


def test_offloaded_weights_keep_their_place_and_dtype(tmp_path: Path):
    model = dispatched(tmp_path / "first", MAPS["both"])
    save_weights(make(1).state_dict(), tmp_path / "second")

    for options in ({"device_map": {"": "cpu"}}, {"dtype": "bfloat16"}):
        with pytest.raises(
            RuntimeError, match=r"second cannot be loaded into .*1\.weight.*remove the hooks first"
        ):
            load_checkpoint_in_model(model, tmp_path / "second", **options)
    assert_computes(model, make(0))


def test_a_load_that_fails_leaves_offloaded_weights_as_they_were(tmp_path: Path):
    model = dispatched(tmp_path / "first", MAPS["disk"])
    save_weights(make(1).state_dict(), tmp_path / "second", max_shard_size=300)
    last = sorted((tmp_path / "second").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])

    with pytest.raises(CheckpointError, match=last.name):
        load_checkpoint_and_dispatch(model, tmp_path / "second", MAPS["memory"])

    assert_computes(model, make(0))


@pytest.mark.skipif(sys.platform != "linux", reason="files are kept open on Linux")
def test_a_load_that_would_change_another_model_changes_nothing(tmp_path: Path):
    model = disk_offload(make(0), tmp_path / "weights")
    save_weights(make(1).state_dict(), tmp_path / "second")
    other = OffloadedWeightsLoader(save_folder=tmp_path / "weights")
    other.index = {"2.bias": other.index["2.bias"]}
    with pytest.raises(ValueError, match=r"weights of a model that is in use.* 2\.bias"):
        load_checkpoint_in_model(model, tmp_path / "second")
    assert_computes(model, make(0))


def test_a_checkpoint_that_is_saved_again_leaves_models_in_use_alone(tmp_path: Path):
    model = dispatched(tmp_path, MAPS["both"])
    save_weights(make(1).state_dict(), tmp_path)

    assert_computes(model, make(0))
    assert_computes(copy.deepcopy(model), make(0))
    assert_computes(load_checkpoint_and_dispatch(make(2), tmp_path, MAPS["both"]), make(1))
    assert_computes(model, make(0))


def test_a_checkpoint_that_is_written_into_is_not_mixed_with_weights_in_use(tmp_path: Path):
    model = dispatched(tmp_path, MAPS["both"])
    save_weights(make(1).state_dict(), tmp_path / "newer")
    for file in (tmp_path / "newer").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    for _ in range(2):
        with torch.no_grad(), pytest.raises(CheckpointError, match=r"1\.(weight|bias) .*has changed.*again"):
            model(X)
    assert_computes(load_checkpoint_and_dispatch(make(0), tmp_path, MAPS["both"]), make(1))


def test_weights_of_the_cpu_outlive_a_save_into_their_folder(tmp_path: Path):
    model = dispatched(tmp_path, MAPS["memory"])
    for seed in (1, 2):
        save_weights(make(seed).state_dict(), tmp_path)

    assert_computes(model, make(0))
    save_weights(model.state_dict(), tmp_path)
    assert_computes(load_checkpoint_and_dispatch(make(3), tmp_path, MAPS["both"]), make(0))
