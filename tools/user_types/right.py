"""A user's script: prepared objects, gathered values and loaders keep their types. Checked, never run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from accel import Accelerator
from accel.data_loader import DataLoaderDispatcher, DataLoaderShard
from accel.observe import Observer
from accel.observe.guard import GuardKwargs
from accel.optimizer import AcceleratedOptimizer
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState
from accel.utils import (
    DummyScheduler,
    DynamoBackend,
    GradScalerKwargs,
    LoggerType,
    PrecisionType,
    TorchDynamoPlugin,
    broadcast,
    gather,
    pad_across_processes,
    reduce,
)


class Net(torch.nn.Module):
    """A model with its own method."""

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return features of shape (rows, 8)."""
        return inputs


Batch = tuple[torch.Tensor, torch.Tensor]


class Rows(Dataset[Batch]):
    """Inputs of shape (2,) and targets of shape (1,)."""

    def __getitem__(self, index: int) -> Batch:
        return torch.ones(2), torch.ones(1)

    def __len__(self) -> int:
        return 4


class Norms(Observer):
    """An observer of the user's."""

    def gradients_clipped(self, norm: torch.Tensor | None) -> None:
        """Print the norm."""
        print(norm)


@dataclass
class Settings:
    """Those of an engine of another package."""

    engine: ClassVar[str] = "late_average"


class Warmup:
    """A scheduler that is none of torch."""

    def step(self) -> None:
        """Step."""


accelerator = Accelerator(
    mixed_precision="bf16", gradient_accumulation_steps=2, dynamo_backend="inductor", log_with=["tensorboard"]
)
Accelerator(mixed_precision=PrecisionType.BF16, dynamo_backend=DynamoBackend.EAGER, log_with=LoggerType.WANDB)
Accelerator(kwargs_handlers=[Norms(), GuardKwargs(), GradScalerKwargs(), Settings()])
AcceleratorState(mixed_precision="bf16")
TorchDynamoPlugin(backend="inductor")
TorchDynamoPlugin(backend=DynamoBackend.EAGER)

net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
data: DataLoader[Batch] = DataLoader(Rows(), batch_size=2)
steps = torch.optim.lr_scheduler.StepLR(sgd, 1)

assert_type(accelerator.prepare(net), Net)
assert_type(
    accelerator.prepare(net, sgd, data, steps),
    tuple[Net, torch.optim.SGD, DataLoader[Batch], torch.optim.lr_scheduler.StepLR],
)
model, optimizer, loader = accelerator.prepare(net, sgd, data)
assert_type(model, Net)
assert_type(optimizer, torch.optim.SGD)
assert_type(loader, DataLoader[Batch])
assert_type(accelerator.prepare_model(net, evaluation_mode=True), Net)
assert_type(accelerator.prepare_data_loader(data), DataLoader[Batch])
assert_type(accelerator.skip_first_batches(loader, 2), DataLoader[Batch])
assert_type(accelerator.unwrap_model(model), Net)
for scheduler in (steps, Warmup(), DummyScheduler(sgd)):
    assert_type(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)

# What `prepare` adds to an optimizer and a loader, a checker sees after an isinstance.
if isinstance(optimizer, AcceleratedOptimizer):
    assert_type(optimizer.step_was_skipped, bool)
if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
    loader.set_epoch(1)
assert_type(accelerator.optimizer_step_was_skipped, bool)

outputs = model.embed(torch.ones(2, 2))
assert_type(accelerator.gather(outputs), torch.Tensor)
assert_type(accelerator.gather_for_metrics(outputs), torch.Tensor)
assert_type(accelerator.gather_for_metrics((outputs, [outputs])), tuple[torch.Tensor, list[torch.Tensor]])
assert_type(accelerator.gather_for_metrics({"a": outputs}), dict[str, torch.Tensor])
assert_type(accelerator.gather_for_metrics(["a", "b"]), list[str])
assert_type(accelerator.gather_for_metrics({"a": 1}, use_gather_object=True), list[Any])
assert_type(accelerator.gather_for_metrics(outputs, True), list[Any])
assert_type(accelerator.gather_for_metrics({"a": 1}), Any)  # objects: a list, unless a tensor is a leaf
assert_type(accelerator.gather_for_metrics("ab"), Any)
assert_type(accelerator.gather_for_metrics(3), Any)
assert_type(accelerator.reduce({"loss": outputs}, reduction="mean"), dict[str, torch.Tensor])
assert_type(accelerator.pad_across_processes(outputs, dim=1), torch.Tensor)
assert_type(gather((outputs, outputs)), tuple[torch.Tensor, torch.Tensor])
assert_type(reduce(outputs, reduction="max"), torch.Tensor)
assert_type(broadcast([outputs]), list[torch.Tensor])
assert_type(pad_across_processes({"a": outputs}), dict[str, torch.Tensor])

assert_type(accelerator.save_state(Path("folder"), blocking=False), str)
assert_type(accelerator.load_state(Path("folder"), missing_ok=True, strict=False, verify=True), bool)
accelerator.save_on_preemption(Path("folder"))
with accelerator.profile() as profiler:
    assert_type(profiler, torch.profiler.profile)

with accelerator.split_between_processes(["a", "b"]) as prompts:
    assert_type(prompts, list[str])


@accelerator.on_main_process
def report(value: int) -> str:
    """Return a line."""
    return str(value)


assert_type(report(3), str | None)


@accelerator.on_process(process_index=0)
def first(value: int) -> str:
    """Return a line."""
    return str(value)


@accelerator.on_local_process(local_process_index=0)
def first_here(value: int) -> str:
    """Return a line."""
    return str(value)


assert_type(first(3), str | None)
assert_type(first_here(3), str | None)
assert_type(accelerator.on_process(report, 1)(3), str | None)


@accelerator.on_local_main_process()
def report_here(value: int) -> str:
    """Return a line."""
    return str(value)


assert_type(report_here(3), str | None)
