"""The models and generators of a run are compared as its engine shares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_ops import DistributedOperationException, set_seed

FSDP = FullyShardedDataParallelPlugin
ENGINES = {
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FSDP(fsdp_version=1, use_orig_params=True)},
    "fsdp2": lambda: {"fsdp_plugin": FSDP(fsdp_version=2)},
}


def train(engine: str, device_specific: bool = False) -> tuple[Accelerator, torch.nn.Module]:
    accelerator = Accelerator(cpu=True, **ENGINES[engine]())
    set_seed(3, device_specific=device_specific)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[2].bias.requires_grad_(engine != "ddp")
    loader = DataLoader(torch.rand(24, 3), batch_size=3, shuffle=True)
    optimizer = torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model


def after_training(engine: str, changed: bool) -> Any:
    accelerator, _ = train(engine)
    if changed and accelerator.process_index == 1:
        torch.rand(1)
    try:
        return accelerator.verify_sync(buffers=False)
    except DistributedOperationException as error:
        return str(error)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_ordinary_run_is_in_step_and_says_what_is_sharded(world, engine):
    not_compared = world.run(after_training, engine, False)[0]

    assert len(not_compared) == (0 if engine == "ddp" else 6)
    assert all(name.startswith(("Sequential.", "FSDPSequential.")) for name in not_compared)
    assert "torch's random generator" in world.run(after_training, engine, True)[1]


def save_after(changed: bool, folder: str) -> str:
    """In debug mode, with what may differ in lawful training: running statistics, and seeds."""
    accelerator, model = train("ddp", device_specific=True)
    with pytest.raises(DistributedOperationException, match=r"buffer Sequential\.1\.running_mean"):
        accelerator.verify_sync(model)
    if changed and accelerator.process_index == 1:
        with torch.no_grad():
            accelerator.unwrap_model(model)[2].bias += 0.5  # frozen: no optimizer's step compares it
    try:
        accelerator.save_state(folder)
    except DistributedOperationException as error:
        return str(error)
    return ""


def test_a_checkpoint_in_debug_mode_needs_equal_parameters(world, tmp_path: Path):
    debug = {"ACCELERATE_DEBUG_MODE": "1"}
    assert world.run(save_after, False, str(tmp_path / "good"), env=debug) == ["", ""]
    assert (tmp_path / "good").is_dir()

    told = world.run(save_after, True, str(tmp_path / "bad"), env=debug)
    assert all("parameter Sequential.2.bias (float32 (1,)) is the first to differ" in text for text in told)
    assert "up to 0.5 away from process 0" in told[0]
    assert not (tmp_path / "bad").exists()
    assert world.run(save_after, True, str(tmp_path / "silent")) == ["", ""]
