"""Where DeepSpeed is needed, and where it is not."""

from __future__ import annotations

import sys

import pytest
import torch

from accel.accelerator import Accelerator
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.deepspeed.runtime import GatheredParameters, deepspeed_required, load
from accel_state.accelerator_state import AcceleratorState

pytestmark = pytest.mark.usefixtures("fresh_state")


@deepspeed_required
def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def test_a_function_that_needs_deepspeed_says_which_engine_there_is():
    assert add(1) == 2  # no engine has been chosen yet
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    Accelerator(cpu=True)

    with pytest.raises(ValueError, match="add needs DeepSpeed, and the engine here is that of NO"):
        add(1)

    AcceleratorState(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), cpu=True, _from_accelerator=True)
    assert add(1, b=3) == 4


def test_parameters_are_whole_anywhere_but_under_zero3():
    weight = torch.nn.Linear(2, 3).weight
    with GatheredParameters(weight, modifier_rank=0):
        assert weight.shape == (3, 2)
    AcceleratorState(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), cpu=True)

    with GatheredParameters([weight]):
        assert weight.shape == (3, 2)


def test_where_it_is_not_installed_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)

    with pytest.raises(ImportError, match=r"'\./packages/accel\[deepspeed\]'"):
        load(torch.device("cpu"))
    with pytest.raises(ImportError, match=r"accel\[deepspeed\]"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())


def test_a_plugin_of_another_kind_is_rejected():
    with pytest.raises(TypeError, match="takes a DeepSpeedPlugin"):
        Accelerator(cpu=True, deepspeed_plugin={"train": 3})
    with pytest.raises(ValueError, match="pass one of them"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(), deepspeed_plugins={"a": DeepSpeedPlugin()})
