"""Layers of experts under ZeRO stage 3, which DeepSpeed gathers as a whole."""

from __future__ import annotations

import pytest
import torch

from accel.engines.deepspeed.plugin import DeepSpeedPlugin

# Here, as its import sets an environment variable for good.
pytest.importorskip("deepspeed", reason="the alone environment has no DeepSpeed")


def test_layers_of_experts_become_leaves():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Tanh())

    DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Tanh").set_moe_leaf_modules(model)

    assert [name for name, part in model.named_modules() if getattr(part, "_z3_leaf", False)] == ["1"]
