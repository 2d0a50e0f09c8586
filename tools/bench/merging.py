"""merge-weights: the memory that it takes to make one file out of a sharded checkpoint of two gigabytes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from .loaders import _high_water_mark
from .row import Row
from .workers import end_group, run_workers

__all__ = ["measure_merge", "merge_row", "write_parts"]

MERGE_LIMIT_MB = 600.0
TENSORS, ROWS, COLUMNS = 32, 4096, 4096  # of float32: 64 MiB each
PROCESSES = 4


def merge_row(*, quick: bool = False) -> Row:
    """Measure the peak of a process's memory, all of it, in which `merge_fsdp_weights` runs."""
    rows = ROWS // 16 if quick else ROWS
    with tempfile.TemporaryDirectory() as folder:
        run_workers("merging:write_parts", PROCESSES, folder=f"{folder}/parts", rows=rows)
        peak, seconds, size = run_workers("merging:measure_merge", 1, folder=folder)
    return Row(
        what=f"merge-weights of a sharded checkpoint of {size / 1e9:.1f} GB: peak memory of the process",
        value=peak / 1e6,
        limit=MERGE_LIMIT_MB,
        unit="MB",
        base=f"{seconds:.1f} s",
    )


def write_parts(rank: int, size: int, folder: str, rows: int) -> None:
    """Write one process's part of the checkpoint; runs in a worker."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (size,))
    weights = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.full((rows // size, COLUMNS), float(number)), mesh, [Shard(0)]
        )
        for number in range(TENSORS)
    }
    save({"model": weights}, checkpoint_id=folder)
    dist.barrier()
    end_group()


def measure_merge(rank: int, size: int, folder: str) -> tuple[int, float, int]:
    """Merge, and return the peak of memory, the seconds, and the size of the file; runs in a worker."""
    from accel_ckpt.sharded.merge import merge_fsdp_weights

    start = time.perf_counter()
    merge_fsdp_weights(f"{folder}/parts", folder)
    seconds = time.perf_counter() - start
    return _high_water_mark(), seconds, (Path(folder) / "model.safetensors").stat().st_size
