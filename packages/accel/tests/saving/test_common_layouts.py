"""Sharded checkpoints in which some weights lie on fewer processes than others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ckpt.sharded import dcp_folder
from accel_state.parallelism.config import ParallelismConfig

MESHES: dict[str, Callable[[], ParallelismConfig]] = {
    "fsdp2 x tp": lambda: ParallelismConfig(dp_shard_size=2, tp_size=2),
    "hsdp": lambda: ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
}


class Block(torch.nn.Module):
    """The norm is left out of the plan, as in most models' plans."""

    _tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def begin(mesh: str, seed: int) -> tuple[Accelerator, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=MESHES[mesh]())
    model = Block(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def save_and_go_on(mesh: str, folder: str, blocking: bool) -> dict[str, torch.Tensor]:
    run = begin(mesh, seed=0)
    step(*run)
    weights = run[1].state_dict()
    on = {name: weights[f"{name}.weight"].device_mesh.size() for name in ("norm", "up")}
    assert on == {"norm": 2 if mesh == "fsdp2 x tp" else 4, "up": 4}
    # Torch's plan, which the main process makes for all.
    with mock.patch.object(dcp_folder, "save", side_effect=AssertionError):
        run[0].save_state(folder, blocking=blocking)
        run[0].wait_for_save()
    step(*run)
    return whole(run[1])


def resume(mesh: str, folder: str) -> dict[str, torch.Tensor]:
    run = begin(mesh, seed=1)
    run[0].load_state(folder)
    step(*run)
    return whole(run[1])


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_plans_for_itself(world: Any, tmp_path: Path, mesh: str, blocking: bool) -> None:
    straight = world.run(save_and_go_on, mesh, str(tmp_path / "saved"), blocking, size=4)[0]

    for resumed in world.run(resume, mesh, str(tmp_path / "saved"), size=4):
        assert resumed.keys() == straight.keys()
        assert all(resumed[name].equal(straight[name]) for name in straight)
