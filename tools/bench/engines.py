"""The step of a small transformer under DDP, FSDP2 and tensor parallelism, compared with the same by hand.

By hand means torch's own calls: `DistributedDataParallel`, `fully_shard` for each block and then for the
model, `parallelize_module` with the same plan. A step is forward, backward, optimizer step and zero_grad;
clipping is measured in `clipping.py`, and memory here too, in processes that do nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .devices import join_group, waiting
from .loaders import _high_water_mark
from .row import Row
from .step import Contestant, check_same_work
from .timing import BASELINE, CONTROL, Samples, interleave, ratios, spread, timed
from .workers import end_group, run_workers

__all__ = [
    "WIDTH",
    "engine_memory_rows",
    "engine_row",
    "engine_rows",
    "make_transformer",
    "measure_engine",
    "measure_memory",
    "size_of",
    "step_by_accel",
    "step_by_hand",
]

LIMIT = 1.03
WORDS, HEADS, LENGTH, BATCH = 1024, 4, 64, 4
LAYERS, WIDTH = 4, 256  # of the model whose step is timed

MEMORY_LIMIT = 1.02
MEMORY_WIDTH, MEMORY_STEPS = 1024, 2

BY_HAND = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard", "tp": "parallelize_module"}


def engine_rows(*, quick: bool = False) -> list[Row]:
    """Measure a step on 2 processes under each engine, as a multiple of the same with torch's own calls."""
    return [engine_row(engine, 2, quick=quick) for engine in BY_HAND]


def engine_row(engine: str, size: int, *, quick: bool = False, device: str = "cpu") -> Row:
    """Measure a step under one engine, as a multiple of the same with torch's own calls."""
    rounds = 3 if quick else 50
    samples: Samples = run_workers(
        "engines:measure_engine", size, engine=engine, rounds=rounds, device=device
    )
    compared = ratios(samples)
    place = f"{engine}, {size} process{'es' * (size > 1)}"
    return Row(
        what=f"step of a transformer of {size_of(WIDTH)}, {place}: time / {BY_HAND[engine]}",
        value=compared["accel"].median,
        limit=LIMIT,
        noise=compared[CONTROL],
        base=f"{1e3 * median(samples[BASELINE]):.1f} ms",
    )


def engine_memory_rows(*, quick: bool = False) -> list[Row]:
    """Measure the peak of memory of one of 2 processes over a few steps, compared with the same by hand."""
    width, runs = (WIDTH, 2) if quick else (MEMORY_WIDTH, 3)
    rows = []
    for engine, by_hand in BY_HAND.items():
        peaks: dict[bool, list[int]] = {False: [], True: []}
        for _ in range(runs):
            for accel, found in peaks.items():
                arguments = {"engine": engine, "accel": accel, "width": width}
                found.append(run_workers("engines:measure_memory", 2, **arguments))
        base = median(peaks[False])
        rows.append(
            Row(
                what=f"memory of training {size_of(width)}, {engine}, 2 processes: peak / {by_hand}",
                value=median(peaks[True]) / base,
                limit=MEMORY_LIMIT,
                noise=spread([peak / base for peak in peaks[False]]),
                base=f"{base / 1e6:.0f} MB",
            )
        )
    return rows


def measure_engine(rank: int, size: int, engine: str, rounds: int, device: str) -> Samples:
    """Time one step of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    join_group(rank, size, device)
    contestants = {
        BASELINE: _by_hand(engine, WIDTH, device),
        CONTROL: _by_hand(engine, WIDTH, device),
        "accel": _accel(engine, WIDTH, device),
    }
    measures = {name: timed(contestant.step, 2, waiting(device)) for name, contestant in contestants.items()}
    samples = interleave(measures, rounds=rounds, warmup=2)
    parts = {
        name: Contestant(item.step, [_local(each) for each in item.parameters])
        for name, item in contestants.items()
    }
    check_same_work(parts)
    end_group()
    return samples


def measure_memory(rank: int, size: int, engine: str, accel: bool, width: int) -> int:
    """Return by how many bytes the peak of this process's memory grows over a few steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    make = _accel if accel else _by_hand
    for _ in range(2):  # what is imported and made once is no cost of the model
        make(engine, 64).step()
    before = _high_water_mark()
    contestant = make(engine, width)
    for _ in range(MEMORY_STEPS):
        contestant.step()
    peak = _high_water_mark() - before
    end_group()
    return peak


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.features = width // HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        normed = self.norm_1(x)
        parts = (layer(normed) for layer in (self.q, self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, self.features)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added


class Transformer(nn.Module):
    """A language model of a few blocks."""

    _no_split_modules = ("Block",)
    _tp_plan = {  # noqa: RUF012 - as transformers' models have it
        **dict.fromkeys(["blocks.*.q", "blocks.*.k", "blocks.*.v", "blocks.*.up"], "colwise"),
        **dict.fromkeys(["blocks.*.out", "blocks.*.down"], "rowwise"),
    }

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, length) to logits (batch, length, words)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def size_of(width: int) -> str:
    """Return the number of parameters in words."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Transformer(width).parameters())
    return f"{count / 1e6:.1f} million"


def make_transformer(width: int) -> Transformer:
    """Make the model; always the same one."""
    torch.manual_seed(0)
    return Transformer(width)


def _batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _by_hand(engine: str, width: int, device: str = "cpu") -> Contestant:
    """Make the step with torch's own calls."""
    plain = make_transformer(width).to(device)
    wrap: dict[str, Callable[[Any], Any]] = {
        "ddp": nn.parallel.DistributedDataParallel,
        "fsdp2": functools.partial(_shard, device=device),
        "tp": functools.partial(_split, device=device),
    }
    return step_by_hand(wrap[engine](plain), plain, device)


def step_by_hand(model: nn.Module, plain: nn.Module, device: str) -> Contestant:
    """Make the step of a model that is on its device, wrapped or not."""
    optimizer = _optimizer(model)
    inputs, labels = _batch(device)

    def step() -> None:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, list(plain.parameters()))


def _shard(model: Transformer, device: str) -> Transformer:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _split(model: Transformer, device: str) -> nn.Module:
    styles: dict[str, Callable[[], Any]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in model._tp_plan.items()}
    return parallelize_module(model, init_device_mesh(device, (dist.get_world_size(),)), plan)


def _accel(engine: str, width: int, device: str = "cpu") -> Contestant:
    """Make the step with an Accelerator."""
    from accel import Accelerator
    from accel.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    options: dict[str, Any] = {}
    if engine == "fsdp2":
        policy = "transformer_based_wrap"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)
        options["fsdp_plugin"] = plugin
    if engine == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=dist.get_world_size())
    return step_by_accel(Accelerator(cpu=device == "cpu", **options), width, device)


def step_by_accel(accelerator: Any, width: int, device: str) -> Contestant:
    """Make the step of a model that an Accelerator prepares."""
    plain = make_transformer(width)
    model, optimizer = accelerator.prepare(plain, _optimizer(plain))
    inputs, labels = _batch(device)

    def step() -> None:
        accelerator.backward(F.cross_entropy(model(inputs).flatten(0, 1), labels))
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(step, list(plain.parameters()))


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
