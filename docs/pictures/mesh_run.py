"""Prints how eight processes are arranged under five settings, as JSON.

Each process is made in turn, in torch's `fake` world, whose collectives move no data: the meshes and the
shards of the data are what accel computes.
"""

import json
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel import Accelerator
from accel.utils import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState

PROCESSES = 8
SETTINGS: dict[str, dict[str, int]] = {
    "ddp": {},
    "fsdp2": {"dp_shard_size": 8},
    "fsdp2, replicas of shards (HSDP)": {"dp_replicate_size": 2, "dp_shard_size": 4},
    "fsdp2 x tp": {"dp_shard_size": 4, "tp_size": 2},
    "fsdp2 x cp": {"dp_shard_size": 4, "cp_size": 2},
}


def process(rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what one process knows: its engine, its coordinates in the mesh, its shard of the data."""
    dist.init_process_group("fake", rank=rank, world_size=PROCESSES, store=FakeStore())
    try:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None)
        mesh = accelerator.engine.data_parallel.mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        where = () if mesh is None else mesh.get_coordinate() or ()
        share, shares = accelerator.engine.data_parallel.rank_and_size
        return {
            "engine": accelerator.engine.name,
            "mesh": dict(zip(names, where, strict=True)),
            "share": share,
            "shares": shares,
        }
    finally:
        AcceleratorState._reset_state(True)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    print(
        json.dumps(
            {name: [process(rank, sizes) for rank in range(PROCESSES)] for name, sizes in SETTINGS.items()}
        )
    )
