"""Profiling through the Accelerator."""

from __future__ import annotations

import json

import pytest
import torch

from accel.accelerator import Accelerator
from accel_state.handlers import ProfileKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_profile_sees_the_operations_and_writes_one_trace_per_process(tmp_path):
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
    accelerator = Accelerator(kwargs_handlers=[handler])

    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)

    assert any("mm" in event.key for event in profiler.key_averages())
    assert json.loads((tmp_path / "traces" / "profile_0.json").read_text())["traceEvents"]


def test_a_handler_of_the_call_comes_before_the_constructors(tmp_path):
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path / "a"))])

    with accelerator.profile(ProfileKwargs(activities=["cpu"])):
        torch.ones(2) + 1

    assert not (tmp_path / "a").exists()
