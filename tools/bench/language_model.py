"""Tokens per second of the example `language_model.py` at 25 million parameters, and of the same by hand.

A turn is what a script does between two checkpoints: a save is started, optimizer steps follow (bf16
autocast, accumulation, clipping, a schedule), then an evaluation, and the turn ends when the save is
complete. Model, data, loss and schedule are those of the example.

By hand, plain PyTorch saves in the background too: it copies the states and writes them by `torch.save` and
fsync in a thread, without digests. accelerate has only a blocking save, which leaves its files to the system;
they are flushed at the end of its turn, as the others' are.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset

from .row import Row
from .timing import BASELINE, CONTROL, Samples, interleave, ratios
from .workers import end_group, run_workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"
LIMIT = 0.99
LAYERS, HEADS, WIDTH = 8, 8, 512
MICRO_BATCH, ACCUMULATION = 2, 2
MAX_NORM, WARMUP = 1.0, 4
TOLERANCE = 0.02  # of a loss: bf16 has 8 bits
SIZES = {
    # Sequence, optimizer steps of a turn, sequences of an evaluation, turns
    "cpu": {"length": 64, "steps": 4, "held_out": 8, "rounds": 16},
    "cuda": {"length": 512, "steps": 100, "held_out": 64, "rounds": 8},
}
QUICK = {"length": 32, "steps": 1, "held_out": 3, "rounds": 2}


def language_model_rows(*, quick: bool = False, device: str = "cpu") -> list[Row]:
    """Measure training with all that belongs to it, on one process and on two.

    Args:
        quick: Whether to see that it runs, and not to measure.
        device: "cpu" or "cuda"; on "cuda" the model is compiled and batches are copied ahead.
    """
    sizes = QUICK if quick else SIZES[device]
    rows = []
    for processes in (1, 2) if device == "cpu" else range(1, min(2, torch.cuda.device_count()) + 1):
        found = run_workers("language_model:measure_training", processes, device=device, **sizes)
        samples: Samples = found["seconds"]
        speeds = {name: 1 / spread.median for name, spread in ratios(samples).items()}
        theirs = speeds.get("accelerate")
        tokens = processes * sizes["steps"] * ACCUMULATION * MICRO_BATCH * sizes["length"]
        rows.append(
            Row(
                what=f"training the language model, {found['parameters'] / 1e6:.1f} million, "
                f"{processes} process{'es' * (processes > 1)}: tokens per second / plain PyTorch",
                value=speeds["accel"],
                limit=LIMIT,
                at_least=True,
                condition=None if theirs is None else ("not behind accelerate", speeds["accel"] >= theirs),
                peers={} if theirs is None else {"accelerate": theirs},
                noise=ratios(samples)[CONTROL],
                base=f"{tokens / median(samples[BASELINE]):.0f} tokens per second",
            )
        )
    return rows


def measure_training(
    rank: int, size: int, device: str, length: int, steps: int, held_out: int, rounds: int
) -> dict[str, Any]:
    """Time turns of each contestant; runs in each worker."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl", rank=rank, world_size=size)
    task = Task(length, steps, held_out, device, rank, size, (rounds + 1) * steps)
    contestants: dict[str, Training] = {
        BASELINE: _by_hand(task),
        CONTROL: _by_hand(task),
        "accel": _by_accelerator(task, "accel"),
    }
    if importlib.util.find_spec("accelerate"):
        contestants["accelerate"] = _by_accelerator(task, "accelerate")
    with tempfile.TemporaryDirectory() as folder:
        # All processes save into the folder of the first.
        shared = [folder]
        if size > 1:
            dist.broadcast_object_list(shared)
        measures = {name: partial(_turn, item, Path(shared[0])) for name, item in contestants.items()}
        seconds = interleave(measures, rounds=rounds)
        if size > 1:
            dist.barrier()
    _check_same_training(contestants, size, device)
    parameters = sum(item.numel() for item in contestants[BASELINE].model.parameters())
    if size > 1:
        end_group()
    return {"seconds": seconds, "parameters": parameters}


def _example() -> ModuleType:
    """Import the example under its own name, under which torch.compile looks for what its code uses."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Task:
    """What every contestant trains on, from the example: the same batches in the same order.

    Args:
        length: Bytes of a sequence.
        steps: Optimizer steps of a turn.
        held_out: Sequences of an evaluation.
        device: "cpu" or "cuda".
        rank: This process.
        size: All processes.
        total: Optimizer steps of all turns.
    """

    def __init__(
        self, length: int, steps: int, held_out: int, device: str, rank: int, size: int, total: int
    ) -> None:
        self.example = _example()
        self.device, self.rank, self.size, self.length, self.total = device, rank, size, length, total
        with tempfile.TemporaryDirectory() as folder:  # what is mapped stays readable
            text = self.example.write_cache(self.example.stdlib_files(), Path(folder), "all")
            windows = self.example.Windows(text, length)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
        count = steps * ACCUMULATION * MICRO_BATCH * size
        self.train = Subset(windows, order[:count])
        self.test = Subset(windows, order[count : count + held_out])

    def parts(self) -> tuple[nn.Module, Any, Any]:
        """Make the model, its optimizer and its schedule; always the same ones."""
        torch.manual_seed(0)
        model = self.example.GPT(self.length, LAYERS, HEADS, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
        factor = partial(self.example.learning_rate_factor, warmup_steps=WARMUP, max_steps=self.total)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def loaders(self, *, own: bool) -> list[DataLoader[Any]]:
        """Make the loaders of training and evaluation, of all samples or of this process's."""
        batch, share = MICRO_BATCH * self.size, slice(self.rank, None, self.size)
        train, test, pinned = self.train, self.test, self.device == "cuda"
        if own:  # a slice of each batch in training, and every n-th sample in evaluation
            starts = range(self.rank * MICRO_BATCH, len(train), batch)
            train = Subset(train, [start + place for start in starts for place in range(MICRO_BATCH)])
            test = Subset(test, range(len(test))[share])
            batch = MICRO_BATCH
        return [DataLoader(data, batch, pin_memory=pinned) for data in (train, test)]

    def losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sequence."""
        losses: torch.Tensor = self.example.sequence_losses(logits, targets)
        return losses


@dataclass(frozen=True)
class Training:
    """What a contestant does in a turn.

    Attributes:
        model: The model, unwrapped.
        train: Makes the optimizer steps of a turn; returns the losses of its micro-batches.
        evaluate: Returns the losses of all held-out sequences.
        save: Begins a checkpoint in this folder.
        finish: Waits until it is complete.
        found: All losses, and the perplexity of each turn.
    """

    model: nn.Module
    train: Callable[[], list[torch.Tensor]]
    evaluate: Callable[[], torch.Tensor]
    save: Callable[[Path], object]
    finish: Callable[[], object]
    found: list[float] = field(default_factory=list)


def _turn(item: Training, folder: Path) -> float:
    """Return the seconds of a turn; what it wrote is deleted afterwards."""
    target = folder / "checkpoint"
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    item.save(target)
    losses = item.train()
    losses_held_out = item.evaluate()
    item.finish()
    # Reading them waits for the device.
    item.found.extend([*torch.stack(losses).tolist(), math.exp(losses_held_out.mean().item())])
    seconds = time.perf_counter() - start
    if dist.is_initialized():
        dist.barrier()
    shutil.rmtree(target, ignore_errors=True)
    return seconds


def _by_hand(task: Task) -> Training:
    plain, optimizer, schedule = task.parts()
    plain.to(task.device)
    options: dict[str, Any] = {"device_ids": [task.rank]} if task.device == "cuda" else {}
    model: Any = nn.parallel.DistributedDataParallel(plain, **options) if task.size > 1 else plain
    if task.device == "cuda":
        model = torch.compile(model)
    loader, held_out = task.loaders(own=True)
    autocast = partial(torch.autocast, task.device, torch.bfloat16)
    threads: list[threading.Thread] = []

    def losses_of(batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = (item.to(task.device, non_blocking=True) for item in batch)
        with autocast():
            logits = model(inputs)
        return task.losses(logits.float(), targets)

    def train() -> list[torch.Tensor]:
        model.train()
        found = []
        for index, batch in enumerate(loader):
            ends = (index + 1) % ACCUMULATION == 0
            with contextlib.nullcontext() if ends or task.size == 1 else model.no_sync():
                loss = losses_of(batch).mean()
                (loss / ACCUMULATION).backward()  # type: ignore[no-untyped-call]
            if ends:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(loss.detach())
        return found

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        model.eval()
        found = torch.cat([losses_of(batch) for batch in held_out])
        if task.size == 1:
            return found
        # One of the processes may have a sequence more: each sends as many, and those too many are cut off.
        longest = -(-len(task.test) // task.size)
        padded = torch.nn.functional.pad(found, (0, longest - len(found)))
        every = [torch.empty_like(padded) for _ in range(task.size)]
        dist.all_gather(every, padded)
        return torch.stack(every, dim=1).flatten()[: len(task.test)]

    def save(folder: Path) -> None:
        if task.rank:
            return
        states = {"model": plain, "optimizer": optimizer, "schedule": schedule}
        copied = {name: copy.deepcopy(item.state_dict()) for name, item in states.items()}
        threads.append(threading.Thread(target=_write, args=(copied, folder)))
        threads[-1].start()

    def finish() -> None:
        while threads:
            threads.pop().join()

    return Training(plain, train, evaluate, save, finish)


def _write(states: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, state in states.items():
        with open(folder / f"{name}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def _by_accelerator(task: Task, library: str) -> Training:
    """Make the training of either library: they share one interface, and no type."""
    imported = importlib.import_module(library)
    data: Any = importlib.import_module(f"{library}.utils").DataLoaderConfiguration
    accelerator = imported.Accelerator(
        cpu=task.device == "cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=data(split_batches=True, non_blocking=task.device == "cuda"),
        dynamo_backend="inductor" if task.device == "cuda" else None,
    )
    plain, *others = task.parts()
    model, optimizer, schedule, loader, held_out = accelerator.prepare(
        plain, *others, *task.loaders(own=False)
    )

    def train() -> list[torch.Tensor]:
        model.train()
        found = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = task.losses(model(inputs), targets).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(loss.detach())
        return found

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        model.eval()
        found = []
        for inputs, targets in held_out:
            found.append(accelerator.gather_for_metrics(task.losses(model(inputs), targets)))
        return torch.cat(found)

    if library == "accel":
        save = partial(accelerator.save_state, blocking=False)
        return Training(plain, train, evaluate, save, accelerator.wait_for_save)

    written: list[Path] = []

    def save_blocking(folder: Path) -> None:
        accelerator.save_state(str(folder))
        if task.rank == 0:
            written.append(folder)

    def flush() -> None:
        """Wait for the disk, as the others do."""
        while written:
            for path in written.pop().iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())

    return Training(plain, train, evaluate, save_blocking, flush)


def _check_same_training(contestants: dict[str, Training], size: int, device: str) -> None:
    """All must reach the same losses and perplexities up to rounding: none has skipped work."""
    found = {name: torch.tensor(item.found, device=device) for name, item in contestants.items()}
    for values in found.values():
        if size > 1:
            dist.all_reduce(values)
    for name, values in found.items():
        if not torch.allclose(values, found[BASELINE], rtol=TOLERANCE):
            raise RuntimeError(f"{name} finds the losses {values.tolist()}, not {found[BASELINE].tolist()}")
