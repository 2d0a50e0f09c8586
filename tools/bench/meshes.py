"""Preparing a model of 70 billion parameters on a mesh of many processes, compared with torch's own calls.

One process runs, with torch's `fake` process group: its collectives return immediately and move no data, and
everything else is the real code. The model begins on the meta device, and this process gets its weights from
another. The more processes, the more replicas there are: a process has the same share in all worlds.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from .large_model import LARGE, SMALL, LargeModel, Sizes, by_hand
from .row import Row
from .timing import spread
from .workers import run_workers

WORLDS = (1_024, 8_192, 65_536)
LAYERS = {"fsdp2": 80, "fsdp2 x tp": 20}
"""All of a 70B model, and a quarter of them where most of the time is copying each weight's part."""

SHARDS = {"fsdp2": (128, 1), "fsdp2 x tp": (16, 8)}  # of one replica, and the processes that split weights
TIME_LIMIT, MEMORY_LIMIT_MB = 1.1, 16.0
ROUNDS = 3
RANK = 1  # not the first, which has weights to send


def mesh_rows(*, quick: bool = False) -> list[Row]:
    """Measure `prepare` in worlds of up to 65,536 processes, and count what a step sends."""
    worlds = WORLDS[:1] if quick else WORLDS
    rows = []
    for engine in SHARDS:
        layers = 2 if quick else LAYERS[engine]
        found = {world: _ratios(engine, world, layers, quick) for world in worlds}
        rows += [_time_row(engine, world, layers, *values) for world, values in found.items()]
        ends = {
            world: _measured("measure_memory", engine, world, layers) for world in (worlds[0], worlds[-1])
        }
        rows.append(
            Row(
                what=f"prepare of {layers} layers of 70B, {engine}: memory of Python after it, "
                f"{worlds[-1]:,} processes - {worlds[0]:,}",
                value=ends[worlds[-1]] - ends[worlds[0]],
                limit=MEMORY_LIMIT_MB,
                unit="MB",
                base=f"{ends[worlds[0]]:.1f} MB",
            )
        )
    for engine in SHARDS:
        rows.append(_collectives_row(engine, worlds[-1]))
    return rows


def _ratios(engine: str, world: int, layers: int, quick: bool) -> tuple[list[float], list[float]]:
    """Return the CPU seconds by hand and those of accel, in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(2 if quick else ROUNDS):
        for accel, values in enumerate(found):
            values.append(_measured("measure_prepare", engine, world, layers, accel=bool(accel)))
    return found


def _time_row(engine: str, world: int, layers: int, hand: list[float], ours: list[float]) -> Row:
    base = median(hand)
    call = "fully_shard" if engine == "fsdp2" else "parallelize_module and fully_shard"
    return Row(
        what=f"prepare of {layers} layers of 70B, {engine}, {world:,} processes: CPU time / {call}",
        value=median(own / other for own, other in zip(ours, hand, strict=True)),
        limit=TIME_LIMIT,
        noise=spread([value / base for value in hand]),
        base=f"{base:.1f} s",
    )


def _collectives_row(engine: str, world: int) -> Row:
    hand, ours = (_measured("count_collectives", engine, world, accel=accel) for accel in (False, True))
    return Row(
        what=f"step of {SMALL.layers} layers, {engine}, {world:,} processes: collectives / by hand",
        value=sum(ours.values()) / sum(hand.values()),
        limit=1.0,
        condition=("as many of each kind", ours == hand),
        base=f"{sum(hand.values())} collectives",
    )


def _measured(function: str, engine: str, world: int, layers: int | None = None, **options: Any) -> Any:
    given = {"engine": engine, "world": world, **options} | ({} if layers is None else {"layers": layers})
    return run_workers(f"meshes:{function}", 1, **given)


def measure_prepare(rank: int, size: int, engine: str, world: int, layers: int, accel: bool) -> float:
    """Return the CPU seconds of sharding the large model; runs in a worker."""
    _prepared(engine, world, _sized(SMALL, 1), accel)()  # what is imported and made once
    _end(accel)
    prepare = _prepared(engine, world, _sized(LARGE, layers), accel)
    start = time.process_time()
    prepare()
    return time.process_time() - start


def measure_memory(rank: int, size: int, engine: str, world: int, layers: int) -> float:
    """Return how much memory of Python, in MB, `prepare` leaves in use; runs in a worker."""
    _prepared(engine, WORLDS[0], _sized(SMALL, 1), True)()
    _end(True)
    prepare = _prepared(engine, world, _sized(LARGE, layers), True)
    tracemalloc.start()
    kept = prepare()  # noqa: F841 - it lives until the memory was read
    return tracemalloc.get_traced_memory()[0] / 1e6


def count_collectives(rank: int, size: int, engine: str, world: int, accel: bool) -> dict[str, int]:
    """Return how many collectives of each kind a step of a small model makes; runs in a worker."""
    model, backward, optimizer = _prepared(engine, world, SMALL, accel, trains=True)()
    tokens = torch.zeros(1, 8, dtype=torch.long)

    def step() -> None:
        backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes what later ones have
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
        step()
    return {str(kind): count for kind, count in sorted(counted.get_comm_counts().items(), key=str)}


def _sized(sizes: Sizes, layers: int) -> Sizes:
    return Sizes(**{**vars(sizes), "layers": layers})


def _prepared(
    engine: str, world: int, sizes: Sizes, accel: bool, trains: bool = False
) -> Callable[[], tuple[Any, Callable[[torch.Tensor], object], Any]]:
    """Make a world and a model, and return what shards it."""
    shards, tensor = SHARDS[engine]
    replicas = world // shards // tensor
    dist.init_process_group("fake", rank=RANK, world_size=world, store=FakeStore())
    with torch.device("meta"):
        model = LargeModel(sizes)
    if accel:
        return _by_accel(model, replicas, shards, tensor, trains)
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (replicas, shards, tensor), mesh_dim_names=names)

    def shard() -> tuple[Any, Callable[[torch.Tensor], object], Any]:
        by_hand(model, mesh["dp_replicate", "dp_shard"], mesh["tp"] if tensor > 1 else None)
        return model, torch.Tensor.backward, _optimizer(model) if trains else None

    return shard


def _by_accel(
    model: LargeModel, replicas: int, shards: int, tensor: int, trains: bool
) -> Callable[[], tuple[Any, Callable[[torch.Tensor], object], Any]]:
    from accel import Accelerator
    from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=True
    )
    mesh = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=tensor)
    accelerator: Any = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh)

    def shard() -> tuple[Any, Callable[[torch.Tensor], object], Any]:
        prepared = accelerator.prepare(model)
        optimizer = accelerator.prepare(_optimizer(model)) if trains else None
        return prepared, accelerator.backward, optimizer

    return shard


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def _end(accel: bool) -> None:
    if accel:
        from accel.state import AcceleratorState

        AcceleratorState._reset_state(True)
    if dist.is_initialized():
        dist.destroy_process_group()
