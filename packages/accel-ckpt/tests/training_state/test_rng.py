from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_ckpt.files import tensors
from accel_ckpt.training_state import rng
from accel_state.devices import table
from accel_state.process.state import current_process


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_all_generators_continue_where_they_were(tmp_path: Path) -> None:
    process = current_process()
    draw()
    tensors.save(rng.get_rng_state(process), tmp_path / "r.pkl")
    expected = [draw() for _ in range(3)]
    assert draw() not in expected
    missing = rng.set_rng_state(tensors.load(tmp_path / "r.pkl"), process)

    assert [draw() for _ in range(3)] == expected
    assert missing == []


def test_the_names_are_those_that_checkpoints_use() -> None:
    states = rng.get_rng_state(current_process())

    assert set(states) == {"random_state", "numpy_random_seed", "torch_manual_seed"}


def test_what_is_missing_is_returned() -> None:
    process = current_process()

    assert rng.set_rng_state({}, process) == ["random_state", "torch_manual_seed"]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process on a device whose row answers with the CPU's generator, as there is no other device here."""
    states: list[Any] = []
    cuda = replace(
        table.DEVICES["cuda"],
        calls={
            "get_rng_state": lambda: torch.tensor([1, 2], dtype=torch.uint8),
            "set_rng_state": states.append,
        },
    )
    monkeypatch.setattr(rng, "device_spec", lambda device: cuda)
    return replace(current_process(), device=torch.device("cuda", 1)), states


def test_the_devices_generator_is_kept_too(accelerator: Any) -> None:
    process, set_states = accelerator
    states = rng.get_rng_state(process)
    assert states["torch_cuda_manual_seed"][0].tolist() == [1, 2]

    assert rng.set_rng_state(states, process) == []
    assert set_states[0].tolist() == [1, 2]
    assert rng.set_rng_state({}, process)[-1] == "torch_cuda_manual_seed"


def test_of_one_state_per_visible_device_its_own_is_taken(accelerator: Any) -> None:
    process, set_states = accelerator
    rng.set_rng_state({"torch_cuda_manual_seed": [torch.zeros(1), torch.ones(1)]}, process)

    assert set_states[0].tolist() == [1]
