from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from accel_ckpt.errors import CheckpointError
from accel_ckpt.training_state.load import load_accelerator_state
from accel_ckpt.training_state.save import save_accelerator_state
from accel_ckpt.weights import read_into as module
from accel_ckpt.weights.files import find_weight_files
from accel_ckpt.weights.read_into import read_into_model


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Linear(4, 5).half())
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].num_batches_tracked.add_(seed)
    return model


def stored(model: nn.Module, folder: Path) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    return path


def equal(first: nn.Module, second: nn.Module) -> bool:
    expected, found = first.state_dict(), second.state_dict()
    return expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)


@pytest.mark.parametrize("piece_bytes", [3, 2**22])
def test_everything_is_read_into_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", piece_bytes)
    saved, model = make(1), make(2)
    own = model.state_dict(keep_vars=True)
    read = read_into_model(model, find_weight_files(stored(saved, tmp_path)))

    assert equal(saved, model)
    assert read.keys() == own.keys()
    assert all(read[name] is own[name] for name in own)


class Own(nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


class OwnPart(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super()._load_from_state_dict(*args, **kwargs)


def skip() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_load_state_dict_pre_hook(lambda *args: None)
    return model


def replaced() -> nn.Module:
    model = nn.Linear(2, 2)
    model.load_state_dict = model.load_state_dict  # type: ignore[method-assign]
    return model


def replaced_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._load_from_state_dict = model[0]._load_from_state_dict  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "of",
    [lambda: Own(2, 2), lambda: nn.Sequential(OwnPart(2, 2)), skip, replaced, replaced_part],
    ids=["model", "part", "hook", "replaced", "replaced part"],
)
def test_a_model_with_a_loading_of_its_own_is_left_to_it(tmp_path: Path, of: Any) -> None:
    saved, model = of(), of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert read_into_model(model, find_weight_files(stored(saved, tmp_path))) == {}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_hook_sees_what_is_in_the_file(tmp_path: Path) -> None:
    saved, model = (
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    )

    def swap(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]

    model.register_load_state_dict_pre_hook(swap)
    save_accelerator_state(tmp_path / "c", [saved.state_dict()], [], [], [], 0, 0)
    load_accelerator_state(tmp_path / "c", [model], [], [], [], 0)
    assert torch.equal(model[0].weight, saved[1].weight)
    assert torch.equal(model[1].weight, saved[0].weight)


def test_weights_of_another_form_are_left_to_load_state_dict(tmp_path: Path) -> None:
    saved = nn.ParameterDict(
        {name: nn.Parameter(torch.randn(2, 3)) for name in ("dtype", "shape", "strides", "plain")}
    )
    model = nn.ParameterDict(
        {
            "dtype": nn.Parameter(torch.zeros(2, 3).double()),
            "shape": nn.Parameter(torch.zeros(3, 2)),
            "strides": nn.Parameter(torch.zeros(3, 2).T),
            "plain": nn.Parameter(torch.zeros(2, 3)),
            "meta": nn.Parameter(torch.zeros(2, 3, device="meta")),
        }
    )
    path = stored(saved, tmp_path)
    assert list(read_into_model(model, find_weight_files(path))) == ["plain"]
    assert torch.equal(model["plain"], saved["plain"])
    assert not any(model[name].any() for name in ("dtype", "shape", "strides"))
    del model["shape"], model["meta"], saved["shape"]
    save_accelerator_state(tmp_path / "c", [saved.state_dict()], [], [], [], 0, 0)
    load_accelerator_state(tmp_path / "c", [model], [], [], [], 0)
    assert all(torch.equal(model[name], saved[name].to(model[name].dtype)) for name in saved)


def test_of_two_names_of_one_weight_the_later_counts(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    path = tmp_path / "model.safetensors"
    for names, expected in ((["a.weight"], 0.0), (["a.weight", "b.weight"], 1.0)):
        values = {name: torch.full((2, 2), float(number)) for number, name in enumerate(names)}
        safetensors.torch.save_file(values, path)
        assert read_into_model(model, find_weight_files(path)).keys() == {"a.weight", "b.weight"}
        assert model["a"].weight.eq(expected).all()


def test_a_file_that_ends_early_is_reported(tmp_path: Path) -> None:
    path = stored(make(1), tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends 5 bytes early"):
        read_into_model(make(2), find_weight_files(path))
