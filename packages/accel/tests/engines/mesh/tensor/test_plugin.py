from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accel.engines.tp_plugin import TorchTensorParallelPlugin
from accel.utils import TorchTensorParallelPlugin as exported
from accel_state.parallelism.config import ParallelismConfig


def test_the_plugin_becomes_the_sizes_of_a_mesh():
    config = TorchTensorParallelPlugin(tp_size=4).complete(None)

    assert exported is TorchTensorParallelPlugin
    assert (config.tp_size, config.active_mesh_dims) == (4, ["tp"])
    both = ParallelismConfig(tp_size=4, dp_shard_size=2)
    assert TorchTensorParallelPlugin(tp_size=4).complete(both) is both


def test_two_sizes_contradict_each_other():
    with pytest.raises(
        ValueError, match=r"tp_size=4, and parallelism_config tp_size=2.*Leave torch_tp_plugin"
    ):
        TorchTensorParallelPlugin(tp_size=4).complete(ParallelismConfig(tp_size=2))


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_the_size_is_a_positive_number(size, error):
    with pytest.raises(error, match="tp_size must be"):
        TorchTensorParallelPlugin(tp_size=size)


def check_meshes() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plugin = TorchTensorParallelPlugin(torch_device_mesh=mesh)
    assert plugin.tp_size == 2
    assert plugin.complete(None).get_device_mesh("cpu") is mesh
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match=r"axes \('dp',\).*'tp' of tp_size=2"):
        TorchTensorParallelPlugin(2, other)
    with pytest.raises(ValueError, match="2 processes; it needs the one axis 'tp' of tp_size=4"):
        TorchTensorParallelPlugin(4, mesh)
    with pytest.raises(ValueError, match=r"\[2\] processes.*dp_shard\(2\), tp\(2\)"):
        plugin.complete(ParallelismConfig(dp_shard_size=2, tp_size=2))
    dist.barrier()


def test_a_mesh_that_is_there_is_used(world):
    world.run(check_meshes)
