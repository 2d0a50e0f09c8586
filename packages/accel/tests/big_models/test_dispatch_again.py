"""Loading other weights into a model that is dispatched, and checkpoints that change under one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import (
    cpu_offload,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accel_ckpt.errors import CheckpointError
from accel_ckpt.weights.files import save_weights

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


def dispatched(folder: Path, device_map: dict[str, str]) -> nn.Module:
    save_weights(make(0).state_dict(), folder)
    with init_empty_weights():
        model = make(0)
    model[3].weight = model[0].weight
    model = load_checkpoint_and_dispatch(model, folder, device_map)
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


@pytest.mark.parametrize("kind", ["memory", "disk", "map", "no map"])
def test_weights_are_not_loaded_beside_those_that_hooks_keep(kind: str, tmp_path: Path):
    if kind in ("map", "no map"):
        model = dispatched(tmp_path / "first", MAPS["both"])
    else:
        model = cpu_offload(make(0), "cpu") if kind == "memory" else disk_offload(make(0), tmp_path / "first")
    save_weights(make(1).state_dict(), tmp_path / "second")

    load = load_checkpoint_and_dispatch if kind == "no map" else load_checkpoint_in_model
    with pytest.raises(RuntimeError, match=r"second cannot fill .*1\.weight.*Remove its hooks first"):
        load(model, tmp_path / "second", {"": "cpu"} if kind == "map" else None)
    assert_computes(model, make(0))

    remove_hook_from_submodules(model)
    load_checkpoint_in_model(model, tmp_path / "second")
    assert_computes(model, make(1))


def test_a_load_that_fails_leaves_offloaded_weights_as_they_were(tmp_path: Path):
    model = dispatched(tmp_path / "first", MAPS["disk"])
    save_weights(make(1).state_dict(), tmp_path / "second", max_shard_size=300)
    last = sorted((tmp_path / "second").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])

    with pytest.raises(CheckpointError, match=last.name):
        load_checkpoint_and_dispatch(model, tmp_path / "second", MAPS["memory"])

    assert_computes(model, make(0))


@pytest.mark.skipif(sys.platform != "linux", reason="files are kept open on Linux")
def test_a_checkpoint_that_is_saved_anew_leaves_models_in_use_alone(tmp_path: Path):
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
        with torch.no_grad(), pytest.raises(CheckpointError, match=r"1\.(weight|bias) .*has changed.*anew"):
            model(X)
    assert_computes(load_checkpoint_and_dispatch(make(0), tmp_path, MAPS["both"]), make(1))


def test_weights_of_the_cpu_outlive_a_save_into_their_folder(tmp_path: Path):
    model = dispatched(tmp_path, MAPS["memory"])
    for seed in (1, 2):
        save_weights(make(seed).state_dict(), tmp_path)

    assert_computes(model, make(0))
    save_weights(model.state_dict(), tmp_path)
    assert_computes(load_checkpoint_and_dispatch(make(3), tmp_path, MAPS["both"]), make(0))
