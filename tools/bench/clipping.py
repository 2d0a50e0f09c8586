"""Clipping gradients that lie on several meshes, compared with torch on plain tensors of the same bytes.

On 2 processes: gradients that FSDP2 and tensor parallelism split, ones that only FSDP2 splits, ones that
tensor parallelism alone splits, and plain ones. The plain tensors of the baseline are as large as this
process's parts, and need no reduction over processes; accel's result is the norm over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = ["clip_rows", "measure_clipping"]

LIMIT = 1.2
SHAPE = (256, 512)  # of this process's part of each gradient: 512 KiB
EACH = 32  # of each of the four kinds
MAX_NORM = 1e9  # gradients stay as they are, and are multiplied all the same


def clip_rows(*, quick: bool = False) -> list[Row]:
    """Measure the norm over mixed meshes, and clipping by it, compared with torch's on plain tensors."""
    rows = []
    for name, by_hand in (("norm", "get_total_norm"), ("clipping", "clip_grad_norm_")):
        samples: Samples = run_workers(
            "clipping:measure_clipping", 2, clips=name == "clipping", rounds=5 if quick else 100
        )
        compared = ratios(samples)
        rows.append(
            Row(
                what=f"{name} of 64 MiB over mixed meshes, 2 processes: time / {by_hand} of plain",
                value=compared["accel"].median,
                limit=LIMIT,
                noise=compared[CONTROL],
                base=f"{1e3 * median(samples[BASELINE]):.2f} ms",
            )
        )
    return rows


def measure_clipping(rank: int, size: int, clips: bool, rounds: int) -> Samples:
    """Time one call of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    own = _accel(clips)
    norm = own()
    _check(0.0 if norm is None else float(norm), size)
    contestants = {BASELINE: _plain(clips), CONTROL: _plain(clips), "accel": own}
    measures = {name: timed(call, 2) for name, call in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=5)
    end_group()
    return samples


def _check(norm: float, size: int) -> None:
    """Parts count once for each process, plain gradients, which all have, once."""
    expected = sum(float(part.square().sum()) for part in _parts()) * (3 * size + 1) / 4
    if abs(norm / expected**0.5 - 1) > 1e-4:
        raise RuntimeError(f"the norm is {norm}, and should be {expected**0.5}")


def _parts() -> list[torch.Tensor]:
    return [torch.full(SHAPE, 0.5) for _ in range(4 * EACH)]


def _plain(clips: bool) -> Callable[[], torch.Tensor]:
    parameters = [nn.Parameter(part) for part in _parts()]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    if clips:
        return partial(nn.utils.clip_grad_norm_, parameters, MAX_NORM)
    return lambda: nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])


def _accel(clips: bool) -> Callable[[], torch.Tensor | None]:
    from accel import Accelerator
    from accel.utils import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    shards = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    split = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    layouts = [(shards, [Shard(0), Shard(1)]), (shards["dp_shard"], [Shard(0)]), (split["tp"], [Shard(1)])]
    parameters = []
    for index, part in enumerate(_parts()):
        whole = part
        if index % 4 < len(layouts):  # as a model has them: the kinds take turns
            whole = DTensor.from_local(part, *layouts[index % 4])
        parameter = nn.Parameter(whole)
        parameter.grad = whole.clone()
        parameters.append(parameter)
    if clips:
        return lambda: accelerator.clip_grad_norm_(parameters, MAX_NORM)
    return lambda: accelerator.engine.clip_gradients(parameters)
