"""Tests with one body for the CPU and for CUDA devices, so that it has run at least on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_world.pool import MAX_SIZE

__all__ = ["environment", "join_lone_group", "needs_cuda", "needs_two_gpus", "on_devices", "on_worlds"]

_COUNT = torch.cuda.device_count()
needs_cuda = pytest.mark.skipif(_COUNT < 1, reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(_COUNT < 2, reason="needs two CUDA devices")

on_devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
)
"""Gives a test its `device`; on "cuda" it is marked `gpu`."""

_ALL = min(max(_COUNT, 2), MAX_SIZE)
on_worlds = pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", 1, id="cpu"),
        pytest.param("cpu", 2, id="cpu x 2"),
        pytest.param("cuda", 1, id="cuda", marks=[pytest.mark.gpu, needs_cuda]),
        pytest.param("cuda", _ALL, id="every cuda", marks=[pytest.mark.gpu, needs_two_gpus]),
    ],
)
"""Gives a test of several processes `device` and `size`: one process, and one for each of several devices."""


def environment(device: str) -> dict[str, str | None]:
    """Return the variables with which a world, or a launched script, runs on a kind of device."""
    return {"ACCELERATE_USE_CPU": "true" if device == "cpu" else None}


def join_lone_group(device: str) -> None:
    """In a world of one process without a group, make one: accel makes none for a single process."""
    if os.environ["WORLD_SIZE"] == "1":
        options: dict[str, Any] = {"backend": "gloo"}
        if device == "cuda":
            options = {"backend": "nccl", "device_id": torch.device("cuda", 0)}
        dist.init_process_group(**options)
