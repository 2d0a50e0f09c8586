"""Which parameters mixed precision keeps in float32."""

from __future__ import annotations

import torch

from accel.engines.fsdp2 import upcast


def test_trainable_parameters_become_float32_but_for_ignored_ones():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)).bfloat16()
    model[0].weight.requires_grad_(False)

    assert upcast(model, set(model[1].parameters())) == ["0.bias"]
    dtypes = {name: item.dtype for name, item in model.named_parameters()}
    assert dtypes == {"0.weight": torch.bfloat16, "0.bias": torch.float32, "1.weight": torch.bfloat16}
