"""The forward pass of an evaluation under FSDP2, compared with `fully_shard` by hand.

torch leaves the outermost weights gathered. accel frees them after a forward pass without gradients, and
gathers them again in the next one: the price of a model that shows its shards between passes (decision 0010).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .engines import WIDTH, make_transformer
from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, timed
from .workers import end_group, run_workers

__all__ = ["evaluation_rows", "measure_evaluation"]

WORDS, BATCH, LENGTH = 1024, 8, 64
LIMITS = {"transformer_based_wrap": 1.25, "no_wrap": 2.0}


def evaluation_rows(*, quick: bool = False) -> list[Row]:
    """Measure a forward pass on 2 processes with blocks wrapped apart, and with the model in one piece."""
    rows = []
    for policy, limit in LIMITS.items():
        samples: Samples = run_workers(
            "evaluation:measure_evaluation", 2, policy=policy, rounds=3 if quick else 30
        )
        compared = ratios(samples)
        rows.append(
            Row(
                what=f"evaluation, fsdp2, {policy}, 2 processes: time / fully_shard",
                value=compared["accel"].median,
                limit=limit,
                noise=compared[CONTROL],
                base=f"{1e3 * median(samples[BASELINE]):.1f} ms",
            )
        )
    return rows


def measure_evaluation(rank: int, size: int, policy: str, rounds: int) -> Samples:
    """Time one forward pass of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    models = {BASELINE: _by_hand(policy), CONTROL: _by_hand(policy), "accel": _accel(policy)}
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    if not torch.equal(models[BASELINE](tokens), models["accel"](tokens)):
        raise RuntimeError("the contestants do not compute the same")
    contestants: dict[str, Callable[[], object]] = {
        name: partial(_evaluate, model, tokens) for name, model in models.items()
    }
    samples = interleave(
        {name: timed(call, 2) for name, call in contestants.items()}, rounds=rounds, warmup=2
    )
    end_group()
    return samples


@torch.no_grad()
def _evaluate(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens)


def _by_hand(policy: str) -> nn.Module:
    model = make_transformer(WIDTH)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if policy != "no_wrap" else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _accel(policy: str) -> nn.Module:
    from accel import Accelerator
    from accel.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)
    model: nn.Module = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(make_transformer(WIDTH))
    return model
