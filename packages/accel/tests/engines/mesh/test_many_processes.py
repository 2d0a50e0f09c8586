"""One process of a world of 1,024: what `prepare` walks, and what a step sends; torch's calls too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.parallelism.config import ParallelismConfig

pytestmark = pytest.mark.usefixtures("fresh_state")

WIDTH = 16
WORLD = {1: (64, 16, 1), 8: (8, 16, 8)}  # replicas, shards and processes that split weights, by the last


class Layer(nn.Module):
    """A feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class Model(nn.Module):
    """Layers, which count how often all their parameters are walked."""

    _no_split_modules = ("Layer",)
    _tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012 - as users write it

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.walks = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.walks += 1
        return super().named_parameters(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Process 1 of a world in which collectives do nothing."""
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        if dist.is_initialized():
            dist.destroy_process_group()


def prepared(model: Model, tensor: int) -> tuple[Accelerator, Any, Any]:
    replicas, shards, _ = WORLD[tensor]
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=shards, tp_size=tensor
        ),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return accelerator, *accelerator.prepare(model, optimizer)


def by_hand(model: Model, tensor: int) -> torch.optim.Optimizer:
    mesh = init_device_mesh("cpu", WORLD[tensor], mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    for layer in model.layers:
        if tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    return torch.optim.AdamW(model.parameters(), foreach=False)


def collectives(model: Any, backward: Callable[[torch.Tensor], object], optimizer: Any) -> dict[Any, int]:
    """How many collectives of each kind the second step makes."""

    def step() -> None:
        backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()
    with CommDebugMode() as counted:
        step()
    return dict(counted.get_comm_counts())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # inputs need no gradients
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # the sum is taken of a view
@pytest.mark.parametrize("tensor", [1, 8])
def test_a_step_makes_the_collectives_of_torchs_own_calls(tensor: int) -> None:
    with fake_world(1024):
        model = Model(3)
        optimizer = by_hand(model, tensor)
        wanted = collectives(model, torch.Tensor.backward, optimizer)
    with fake_world(1024):
        accelerator, model, optimizer = prepared(Model(3), tensor)
        assert collectives(model, accelerator.backward, optimizer) == wanted
    assert sum(wanted.values()) > 3 * 2  # of each layer at least one in forward and one in backward


@pytest.mark.parametrize("tensor", [1, 8])
def test_more_layers_are_no_more_walks_of_the_model(tensor: int) -> None:
    walks = []
    for layers in (2, 6):
        with fake_world(1024):
            _, model, _ = prepared(Model(layers), tensor)
            walks.append(model.walks)
    assert walks[0] == walks[1] > 0


@pytest.mark.skipif(
    not isinstance(getattr(DeviceMesh, "mesh", None), property), reason="this torch keeps the list of ranks"
)
@pytest.mark.parametrize("tensor", [1, 8])
def test_the_ranks_of_a_mesh_are_listed_no_more_often_than_by_torchs_own_calls(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = 0
    torchs = DeviceMesh.mesh.fget

    def counted(mesh: DeviceMesh) -> torch.Tensor:
        nonlocal lists
        lists += 1
        return torchs(mesh)

    monkeypatch.setattr(DeviceMesh, "mesh", property(counted))
    of_four_layers = []
    for make in (by_hand, prepared):
        totals = []
        for layers in (2, 6):
            lists = 0
            with fake_world(1024):
                make(Model(layers), tensor)
            totals.append(lists)
        assert min(totals) > 0
        of_four_layers.append(totals[1] - totals[0])
    hand, ours = of_four_layers
    assert ours <= hand
