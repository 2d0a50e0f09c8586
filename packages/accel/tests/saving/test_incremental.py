"""Incremental saves through the Accelerator: a frozen model with adapters that train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt import checkpoint
from accel_ckpt.config import ProjectConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")

FROZEN = "model-00001-of-00002.safetensors"


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 2, bias=False), nn.Linear(2, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make_run(folder: str, **options):
    torch.manual_seed(0)
    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, incremental_saves=True, **options
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(run, steps: int) -> list[float]:
    accelerator, model, optimizer = run
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 256)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def new_bytes(earlier: Path, later: Path) -> int:
    """Bytes of files that the earlier folder does not have."""
    inodes = {path.stat().st_ino for path in earlier.iterdir()}
    return sum(path.stat().st_size for path in later.iterdir() if path.stat().st_ino not in inodes)


def straight_and_resumed(folder: str, blocking: bool) -> tuple[list[float], list[float]]:
    run = make_run(folder, total_limit=2)
    for _ in range(3):
        train(run, 2)
        run[0].save_state(blocking=blocking)
    run[0].wait_for_save()
    rest = train(run, 3)
    again = make_run(folder)
    again[0].load_state()
    resumed = train(again, 3)
    expected, found = (item[0].unwrap_model(item[1]).state_dict() for item in (run, again))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    return rest, resumed


@pytest.mark.parametrize("blocking", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one_and_writes_a_fifth_at_most(tmp_path, blocking):
    rest, resumed = straight_and_resumed(str(tmp_path), blocking)

    assert resumed == rest
    first, second = (tmp_path / "checkpoints" / f"checkpoint_{number}" for number in (1, 2))
    assert (first / FROZEN).samefile(second / FROZEN)
    whole = sum(path.stat().st_size for path in second.iterdir())
    assert new_bytes(first, second) < whole / 5
    for folder in (first, second):
        checkpoint.verify(folder)


def test_also_on_two_processes(world, tmp_path):
    for rest, resumed in world.run(straight_and_resumed, str(tmp_path), True):
        assert resumed == rest
    first, second = (tmp_path / "checkpoints" / f"checkpoint_{number}" for number in (1, 2))
    assert (first / FROZEN).samefile(second / FROZEN)
    assert not (first / "optimizer.bin").samefile(second / "optimizer.bin")


def test_a_run_continues_with_either_setting(tmp_path):
    run = make_run(str(tmp_path))
    train(run, 2)
    run[0].save_state()
    plain = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    )
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plain.prepare(model, optimizer)
    plain.load_state()
    plain.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").exists()
    run[0].load_state()
    assert all(map(torch.equal, run[1].state_dict().values(), model.state_dict().values()))
    run[1].base.requires_grad_(True)  # from here on everything trains: the usual files
    run[0].save_state()
    names = {path.name for path in (tmp_path / "checkpoints" / "checkpoint_2").iterdir()}
    assert "model.safetensors" in names
    assert FROZEN not in names


def test_hooks_that_take_a_model_out_leave_the_others_their_frozen_weights(tmp_path):
    run = make_run(str(tmp_path))
    second = run[0].prepare(nn.Linear(2, 2))

    def take(models, weights, folder):
        weights.pop(0)

    run[0].register_save_state_pre_hook(take)
    folder = Path(run[0].save_state())
    names = {path.name for path in folder.iterdir()}
    assert second.weight.requires_grad
    assert "model.safetensors" in names
    assert FROZEN not in names


def sharded(folder: str, kind: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, incremental_saves=True)
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run = accelerator, *accelerator.prepare(model, optimizer)
    for _ in range(2):
        train(run, 1)
        accelerator.save_state()
    expected = accelerator.get_state_dict(run[1])
    train(run, 1)
    accelerator.load_state()
    found = accelerator.get_state_dict(run[1])
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_of_sharded_models_full_states_are_linked_and_shards_written(world, tmp_path, kind):
    world.run(sharded, str(tmp_path), kind)
    first, second = (tmp_path / "checkpoints" / f"checkpoint_{number}" for number in (0, 1))
    names = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    same = {str(name) for name in names if (first / name).samefile(second / name)}
    assert same - {"random_states_0.pkl"} == (
        {FROZEN, "model.safetensors.index.json"} if kind == "FULL_STATE_DICT" else set()
    )
    checkpoint.verify(second)
