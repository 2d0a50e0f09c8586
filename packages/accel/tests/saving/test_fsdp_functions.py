"""Models and optimizers saved by themselves, under both versions of FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer


def make(version: int, kind: str) -> tuple[Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    own = {"sync_module_states": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **own)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    # In another order than the modules.
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_and_load(folder: str, kind: str) -> list[Any]:
    found: list[Any] = []
    for before, after in ((1, 2), (2, 1), (1, 1), (2, 2)):
        torch.manual_seed(before)
        accelerator, model, optimizer = make(before, kind)
        plugin = accelerator.state.fsdp_plugin
        train(accelerator, model, optimizer)
        place = f"{folder}/{before}{after}"
        save_fsdp_model(plugin, accelerator, model, place, model_index=1)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, place, optimizer_index=1)
        expected = train(accelerator, model, optimizer)

        torch.manual_seed(before + 7)
        accelerator, model, optimizer = make(after, kind)
        plugin = accelerator.state.fsdp_plugin
        result = load_fsdp_model(plugin, accelerator, model, place, model_index=1)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, place, optimizer_index=1)
        found.append((expected, train(accelerator, model, optimizer), list(result.missing_keys)))
        with pytest.raises((FileNotFoundError, RuntimeError), match="pytorch_model_fsdp"):
            load_fsdp_model(plugin, accelerator, model, place)
    return found


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_what_is_saved_is_loaded_under_both_versions(world, tmp_path, kind):
    for found in world.run(save_and_load, str(tmp_path), kind):
        for expected, losses, missing in found:
            assert losses == pytest.approx(expected, rel=1e-6)
            assert missing == []
    names = {path.name for path in Path(tmp_path, "12").iterdir()}
    whole = {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}
    assert names == (whole if kind == "FULL_STATE_DICT" else {"pytorch_model_fsdp_1", "optimizer_1"})


def refusals(folder: str) -> list[str]:
    found = []
    for kind, options in (
        ("LOCAL_STATE_DICT", {}),
        ("SHARDED_STATE_DICT", {"use_dcp": False}),
    ):
        accelerator, model, _ = make(1, kind)
        with pytest.raises(ValueError, match=r"Set|set|Leave") as error:
            save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder, **options)
        found.append(str(error.value))
    return found


def test_what_cannot_be_saved_is_rejected(world, tmp_path):
    local, parts = world.run(refusals, str(tmp_path), size=1)[0]

    assert "call save_state" in local
    assert "use_dcp=False" in parts


def saved_as_an_adapter(folder: str) -> list[bool]:
    same = []
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        accelerator, model, _ = make(2, kind)
        arguments = (accelerator.state.fsdp_plugin, accelerator, model, f"{folder}/{kind}")
        expected = accelerator.get_state_dict(model)
        save_fsdp_model(*arguments, adapter_only=True)
        torch.nn.init.zeros_(model[0].weight)
        load_fsdp_model(*arguments, adapter_only=True)
        whole = accelerator.get_state_dict(model)
        other = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.PReLU()))
        with pytest.raises(
            RuntimeError, match=r"1\.weight"
        ):  # strictly: it is missing, and 2.weight too many
            load_fsdp_model(*arguments[:2], other, arguments[3], adapter_only=True)
        same.append(all(torch.equal(whole[name], value) for name, value in expected.items()))
    return same


def test_a_model_without_adapters_is_saved_in_full_also_when_its_adapter_is_requested(world, tmp_path):
    """transformers' Trainer requests the adapter alone of whatever it trains."""
    assert world.run(saved_as_an_adapter, str(tmp_path), size=1) == [[True, True]]
