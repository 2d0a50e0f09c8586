"""One process for each device: the groups that are made, collectives, engines and the watchdog."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.observe.watchdog import WatchdogKwargs
from accel.state import PartialState
from accel.utils import broadcast, gather, gather_object, pad_across_processes, reduce
from accel_ops.debug import watchdog
from accel_world.devices import environment, join_lone_group, on_devices, on_worlds

SLOW_S = 240  # a context and a communicator for each device, on a machine that has just been started


def collectives(device: str) -> dict[str, Any]:
    join_lone_group(device)
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    summed = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(summed)
    nested = gather({"row": torch.full((2,), rank, device=device), "half": [torch.ones(1).half().to(device)]})
    padded = pad_across_processes(torch.ones(rank + 1, 2, device=device), pad_index=7)
    accelerator.wait_for_everyone()
    return {
        "backend": dist.get_backend(),
        "device": str(nested["row"].device),
        "all_reduce": summed.tolist(),
        "gather": nested["row"].tolist(),
        "half": [nested["half"][0].dtype, len(nested["half"][0])],
        "objects": gather_object([f"rank {rank}"]),
        "broadcast": broadcast(torch.tensor([rank, rank], device=device), from_process=0).tolist(),
        "sum": reduce(torch.tensor(float(rank + 1), device=device), "sum").item(),
        "mean": reduce(torch.tensor(float(rank + 1), device=device), "mean").item(),
        "large": gather(torch.full((2**18,), float(rank), device=device)).sum().item(),
        "padded": padded.sum().item(),
    }


@on_worlds
def test_collectives_give_the_same_on_every_backend(world, device: str, size: int) -> None:
    results = world.run(collectives, device, size=size, init=False, env=environment(device), timeout_s=SLOW_S)

    total = size * (size + 1) / 2
    for rank, found in enumerate(results):
        assert found == {
            "backend": "nccl" if device == "cuda" else "gloo",
            "device": f"cuda:{rank}" if device == "cuda" else "cpu",
            "all_reduce": [total] * 3,
            "gather": [each for each in range(size) for _ in range(2)],
            "half": [torch.float16, size],
            "objects": [f"rank {each}" for each in range(size)],
            "broadcast": [0, 0],
            "sum": total,
            "mean": total / size,
            "large": 2**18 * size * (size - 1) / 2,
            "padded": 2.0 * (rank + 1) + 14.0 * (size - rank - 1),
        }


class Net(torch.nn.Module):
    """Two blocks, so that FSDP has its own groups for them."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


LENGTH = 64


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(LENGTH, 16, generator=generator), torch.randint(4, (LENGTH,), generator=generator)
    return TensorDataset(x, y)


def by_hand(size: int) -> dict[str, torch.Tensor]:
    """Train on the CPU, on the batches of all processes together."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for x, y in DataLoader(samples(), batch_size=4 * size):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(engine: str, precision: str) -> tuple[str, dict[str, torch.Tensor]]:
    options: dict[str, Any] = {}
    if engine.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(engine[-1]),
            auto_wrap_policy="transformer_based_wrap",
            **({"use_orig_params": True} if engine == "fsdp1" else {}),
        )
    accelerator = Accelerator(mixed_precision=precision, **options)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        assert x.device.type == accelerator.device.type
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return accelerator.engine.name, {name: value.cpu() for name, value in weights.items()}


@on_worlds
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_engines_train_as_a_plain_loop_does(
    world, device: str, size: int, engine: str, precision: str
) -> None:
    """FSDP of one process makes a group by itself, on the device that the process has."""
    results = world.run(
        trained, engine, precision, size=size, init=False, env=environment(device), timeout_s=SLOW_S
    )

    expected = by_hand(size)
    name, weights = results[0]
    assert name == ("single" if engine == "ddp" and size == 1 else engine)
    assert weights.keys() == expected.keys()
    tolerance = 1e-4 if precision == "no" else 2e-2
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=tolerance, rtol=tolerance)


LAUNCHED = """
import sys
import torch
from accel import Accelerator
from accel.utils import gather

accelerator = Accelerator()
ranks = gather(torch.tensor([accelerator.process_index], device=accelerator.device))
current = torch.cuda.current_device() if accelerator.device.type == "cuda" else 0
facts = [accelerator.process_index, current, accelerator.state.backend, *ranks.tolist()]
sys.stdout.write(" ".join(map(str, facts)) + "\\n")  # at once: print writes a line in pieces
accelerator.end_training()
"""


@on_worlds
@pytest.mark.parametrize("launcher", ["accel", "torchrun"])
def test_launchers_give_each_process_a_device(launched, device: str, size: int, launcher: str) -> None:
    run = launched(LAUNCHED, num_processes=size, launcher=launcher, env=environment(device), timeout_s=SLOW_S)

    assert run.returncode == 0, run.stderr
    backend = {"cpu": "gloo", "cuda": "nccl"}[device] if size > 1 else "None"
    everyone = " ".join(map(str, range(size)))
    own = [rank if device == "cuda" else 0 for rank in range(size)]
    # A line of accel launch may be of another process than the one before.
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    assert sorted(lines) == [f"{rank} {own[rank]} {backend} {everyone}" for rank in range(size)]


def comes_late() -> list[str]:
    reports: list[str] = []
    with mock.patch.object(watchdog.Watchdog, "_write", lambda self, text: reports.append(text)):
        PartialState().wait_for_everyone()  # before the clock runs: NCCL takes its time to begin
        accelerator = Accelerator(kwargs_handlers=[WatchdogKwargs(timeout=3.0)])
        if accelerator.process_index == 1:
            time.sleep(8.0)
        accelerator.wait_for_everyone()
        accelerator.end_training()
    return [report for report in reports if "comes_late" in report]  # none of another wait on a busy machine


@on_worlds
def test_the_watchdog_names_who_is_late(world, device: str, size: int) -> None:
    results = world.run(comes_late, size=size, init=False, env=environment(device), timeout_s=SLOW_S)

    if size == 1:
        assert results == [[]]  # there is nobody to wait for
        return
    arrived = ", ".join(str(rank) for rank in range(size) if rank != 1)
    ((report,),) = filter(None, results)  # of one process
    assert f"arrived: {arrived}; not arrived: 1\n" in report


def sharded_without_a_launcher() -> tuple[str, str]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    return dist.get_backend(), str(next(model.parameters()).to_local().device)


@on_devices
def test_a_process_that_no_launcher_started_shards_on_its_device(world, device: str) -> None:
    unlaunched = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))
    found = world.run(
        sharded_without_a_launcher,
        size=1,
        init=False,
        env=unlaunched | environment(device),
        timeout_s=SLOW_S,
    )

    assert found == [("nccl", "cuda:0") if device == "cuda" else ("gloo", "cpu")]
