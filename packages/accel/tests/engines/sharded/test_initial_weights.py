"""Buffers that get memory and values: they are what they were otherwise."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

from accel.engines.initial_weights import WeightSource, materialize_rest
from accel_world.fake import fake_world


def test_buffers_that_were_on_meta_stay_persistent_or_not():
    with fake_world(0, 2):
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Module())
            model[1].register_buffer("table", torch.ones(2), persistent=False)
            model[1].register_buffer("nothing", None)
        before = list(model.state_dict())
        source = WeightSource(init_device_mesh("cpu", (2,)), torch.device("cpu"))
        assert materialize_rest(model, set(), source) == set()

        assert {name: item.device.type for name, item in model.named_buffers()} == {
            "0.running_mean": "cpu",
            "0.running_var": "cpu",
            "0.num_batches_tracked": "cpu",
            "1.table": "cpu",
        }
        assert list(model.state_dict()) == before
        assert "1.table" not in before
        assert model[1].nothing is None
