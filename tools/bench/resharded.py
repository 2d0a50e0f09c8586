"""Loading a sharded checkpoint of 4 processes on 2, compared with plain torch.distributed.checkpoint."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import end_group, run_workers

__all__ = ["measure_resharded", "resharded_row", "save_in_parts"]

LIMIT = 1.3
WIDTH, LAYERS, QUICK_LAYERS = 1024, 50, 4
ROUNDS, QUICK_ROUNDS = 9, 2


def resharded_row(*, quick: bool = False) -> Row:
    """Measure load_sharded_state, digests on, of what another number of processes has saved."""
    layers = QUICK_LAYERS if quick else LAYERS
    with tempfile.TemporaryDirectory() as base:
        run_workers("resharded:save_in_parts", 4, folder=f"{base}/c", layers=layers)
        samples: Samples = run_workers(
            "resharded:measure_resharded",
            2,
            folder=f"{base}/c",
            layers=layers,
            rounds=QUICK_ROUNDS if quick else ROUNDS,
        )
    compared = ratios(samples)
    return Row(
        what=f"sharded load of {layers * WIDTH * WIDTH * 4 // 2**20} MB, AdamW, saved on 4 and loaded on 2: "
        "time / torch.distributed.checkpoint",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{median(samples[BASELINE]):.2f} s",
    )


def save_in_parts(rank: int, size: int, folder: str, layers: int) -> None:
    """Save a sharded model and its optimizer; runs in each of 4 workers."""
    from accel_ckpt.sharded.save_load import save_sharded_state

    model, optimizer = _objects(layers)
    save_sharded_state(folder, [model], [optimizer])
    end_group()


def measure_resharded(rank: int, size: int, folder: str, layers: int, rounds: int) -> Samples:
    """Time loads into a sharded model and its optimizer; runs in each of 2 workers."""
    from accel_ckpt.sharded.save_load import load_sharded_state

    model, optimizer = _objects(layers)
    by_hand = partial(_load_by_hand, folder, model, optimizer)
    contestants: dict[str, Callable[[], object]] = {
        BASELINE: by_hand,
        CONTROL: by_hand,
        "accel": partial(load_sharded_state, folder, [model], [optimizer]),
    }
    measures = {name: partial(_timed, optimizer, load) for name, load in contestants.items()}
    samples = interleave(measures, rounds=rounds)
    end_group()
    return samples


def _objects(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accel_state.process.state import PartialState

    torch.set_num_threads(1)
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _load_by_hand(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load

    weights: dict[str, Any] = {"model": get_model_state_dict(model)}
    load(weights, checkpoint_id=Path(folder, "pytorch_model_fsdp_0"))
    set_model_state_dict(model, weights["model"])
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=Path(folder, "optimizer_0"))
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _timed(optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> float:
    import torch.distributed as dist

    optimizer.state.clear()  # as when a run is resumed
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start
