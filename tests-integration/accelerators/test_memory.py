"""The device's memory: what statistics say of it, and batch sizes that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.observe.statistics import StatisticsKwargs
from accel.utils import find_executable_batch_size, release_memory
from accel_world.devices import on_devices

pytestmark = pytest.mark.usefixtures("fresh_state")

MEBIBYTES = 96


@on_devices
def test_statistics_have_the_peak_of_the_device(device: str, tmp_path: Path) -> None:
    handler = StatisticsKwargs(summary=False, folder=str(tmp_path), synchronize=True)
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[handler])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), 2))
    for x in loader:
        taken = torch.empty(MEBIBYTES * 2**20, dtype=torch.uint8, device=accelerator.device)
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        del taken
    accelerator.end_training()

    found = json.loads((tmp_path / "summary.json").read_text())["ranks"][0]["peak_memory"]
    assert found["host"] > 0
    if device == "cuda":
        assert found["device"] == torch.cuda.max_memory_allocated()
        assert found["device"] >= MEBIBYTES * 2**20
    else:
        assert found["device"] == 0


@on_devices
def test_a_batch_size_is_found_where_memory_really_ends(device: str) -> None:
    accelerator = Accelerator(cpu=device == "cpu")
    quarter = torch.cuda.mem_get_info()[1] // 4 if device == "cuda" else 2**50  # more than can be addressed
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        # Three quarters are the most that there may be; the CPU's allocator has no such limit.
        size = batch_size * quarter if device == "cuda" or batch_size > 3 else 1
        torch.empty(size, dtype=torch.uint8, device=accelerator.device)
        return batch_size

    assert 1 <= train() <= 3
    assert tried[:7] == [10, 9, 8, 7, 6, 5, 4]
    if device == "cuda":
        assert torch.cuda.memory_allocated() < quarter
        assert torch.cuda.memory_reserved() >= quarter  # of the last try, until it is released
        release_memory()
        assert torch.cuda.memory_reserved() < quarter
