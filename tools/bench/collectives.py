"""Gathering a dictionary of 64 small tensors from two processes.

The baseline is one flat all_gather of as many bytes, already in one buffer: the least that any gather of
these tensors can cost.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.distributed as dist

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = ["gather_rows", "measure_gathers"]

NUM_TENSORS = 64
SHAPE = (8, 4)
LIMIT_OVER_FLAT = 1.7
LIMIT_UNDER_ACCELERATE = 10.0


def gather_rows(*, quick: bool = False) -> list[Row]:
    """Measure the gather against the flat all_gather, and, where it is installed, against accelerate's."""
    samples: Samples = run_workers("collectives:measure_gathers", 2, rounds=20 if quick else 600)
    over_flat = ratios(samples)
    base = f"{1e6 * median(samples[BASELINE]):.0f} us"
    what = f"gather of a dict of {NUM_TENSORS} small tensors, 2 processes: time"
    peers = {"accelerate": over_flat["accelerate"].median} if "accelerate" in samples else {}
    noise = over_flat[CONTROL]
    rows = [
        Row(
            f"{what} / one flat all_gather",
            over_flat["accel"].median,
            LIMIT_OVER_FLAT,
            peers=peers,
            noise=noise,
            base=base,
        )
    ]
    if peers:
        faster = ratios(samples, over="accel")["accelerate"].median
        base = f"{1e6 * median(samples['accel']):.0f} us"
        what = f"{what} of accelerate / accel"
        rows.append(Row(what, faster, LIMIT_UNDER_ACCELERATE, at_least=True, noise=noise, base=base))
    return rows


def measure_gathers(rank: int, size: int, rounds: int) -> Samples:
    """Time one gather of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tree = {f"tensor_{index}": torch.full(SHAPE, float(rank)) for index in range(NUM_TENSORS)}
    contestants = {BASELINE: _flat(size), CONTROL: _flat(size), "accel": _accel(tree)}
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _accelerate(tree)
    _check_same_results(contestants, tree, size)
    measures = {name: timed(gather, 3) for name, gather in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=5)
    end_group()
    return samples


def _check_same_results(
    contestants: Mapping[str, Callable[[], object]], tree: dict[str, torch.Tensor], size: int
) -> None:
    """Every gather of the tree must return what leaf-by-leaf concatenation would."""
    expected = torch.cat([torch.full(SHAPE, float(rank)) for rank in range(size)])
    for name, gather in contestants.items():  # in this order on every rank
        if name in (BASELINE, CONTROL):
            continue
        gathered = gather()
        if not isinstance(gathered, dict) or gathered.keys() != tree.keys():
            raise RuntimeError(f"the gather of {name} returns another structure")
        if not all(torch.equal(value, expected) for value in gathered.values()):
            raise RuntimeError(f"the gather of {name} returns other values")


def _flat(size: int) -> Callable[[], object]:
    numel = NUM_TENSORS * SHAPE[0] * SHAPE[1]
    sent, received = torch.zeros(numel), torch.zeros(size * numel)
    # torch 2.13 renamed it, and warns on each call of the old name.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return lambda: all_gather(received, sent)


def _accel(tree: dict[str, torch.Tensor]) -> Callable[[], object]:
    from accel import Accelerator

    accelerator = Accelerator(cpu=True)
    return lambda: accelerator.gather(tree)


def _accelerate(tree: dict[str, torch.Tensor]) -> Callable[[], object]:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    return lambda: accelerator.gather(tree)
