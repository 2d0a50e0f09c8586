"""The checks that `accel test` runs on every process: communication, sharding, training and saving.

Each check is a function of a fresh Accelerator that raises if something is wrong. Run by itself with
`accel launch -m accel.commands.self_check`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.accelerator import Accelerator
from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_optim.handlers import GradScalerKwargs
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin

_STEPS = 6
_BATCH = 4  # samples per process and step
# Largest relative difference between the losses of many processes and of one in fp32. Reduced precisions
# round each activation to 2**-8 (bf16) or 2**-11 (fp16); the last ones have room for the sum of a few.
_TOLERANCE = {"no": 1e-5, "bf16": 3e-2, "fp16": 5e-3, "fp8": 2e-1}


def _expect(true: bool, what: str) -> None:
    if not true:
        raise RuntimeError(what)


def _check_processes(accelerator: Accelerator) -> None:
    """Every rank exists once, and they split work without loss."""
    size = accelerator.num_processes
    ranks = gather_object([accelerator.process_index])
    _expect(sorted(ranks) == list(range(size)), f"ranks are {ranks}, not 0 to {size - 1}")
    with accelerator.split_between_processes(list(range(2 * size + 1))) as items:
        everything = gather_object(list(items))
    _expect(everything == list(range(2 * size + 1)), f"slices of 0 to {2 * size} add up to {everything}")


def _check_collectives(accelerator: Accelerator) -> None:
    """Gather, reduce, broadcast and padding return the right numbers."""
    rank, size = accelerator.process_index, accelerator.num_processes
    local = torch.full((2,), float(rank), device=accelerator.device)
    everyone = [float(r) for r in range(size) for _ in range(2)]
    gathered = accelerator.gather(local).tolist()
    _expect(gathered == everyone, f"gather returned {gathered}, not {everyone}")
    total = accelerator.reduce(local, "sum").tolist()
    expected = [size * (size - 1) / 2] * 2
    _expect(total == expected, f"reduce returned {total}, not {expected}")
    holder = broadcast_object_list([{"from": rank}])
    _expect(holder == [{"from": 0}], f"broadcast returned {holder}, not what rank 0 sent")
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=accelerator.device), pad_index=-1)
    _expect(
        padded.tolist() == [1.0] * (rank + 1) + [-1.0] * (size - 1 - rank), f"padded to {padded.tolist()}"
    )


def _check_sharding(accelerator: Accelerator) -> None:
    """Every sample of a loader comes once, also with uneven batches, and in the same shuffled order."""
    samples = _BATCH * accelerator.num_processes * 3 + 1  # the last step is not full
    for shuffle in (False, True):
        data: Any = range(samples)
        loader = accelerator.prepare(
            torch.utils.data.DataLoader[torch.Tensor](data, batch_size=_BATCH, shuffle=shuffle)
        )
        seen = [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()]
        _expect(sorted(seen) == list(range(samples)), f"shuffle={shuffle}: samples came as {seen}")
        orders = gather_object([tuple(seen)])
        _expect(len(set(orders)) == 1, f"shuffle={shuffle}: the processes disagree about the order")


def _check_training(accelerator: Accelerator) -> None:
    """The losses of all processes are those of a plain loop on one process over the same samples."""
    losses = list(_train(accelerator))
    reference = list(_train_alone(accelerator.device, _BATCH * accelerator.num_processes))
    tolerance = _TOLERANCE[accelerator.mixed_precision]
    for step, (loss, alone) in enumerate(zip(losses, reference, strict=True)):
        _expect(
            abs(loss - alone) <= tolerance * abs(alone),
            f"step {step}: the loss is {loss:.7g}, and {alone:.7g} on one process "
            f"(allowed: a relative difference of {tolerance:g})",
        )


def _check_checkpoint(accelerator: Accelerator) -> None:
    """Training that was saved and loaded continues exactly as without interruption."""
    with _shared_folder(accelerator) as folder:
        training = _train(accelerator)
        for _ in range(_STEPS // 2):
            next(training)
        accelerator.save_state(folder)
        straight = list(training)  # continues from the same objects, which load_state then takes back
        accelerator.load_state(folder)
        resumed = list(_continue(accelerator, _STEPS // 2))
        accelerator.wait_for_everyone()  # before the folder is removed
    _expect(straight == resumed, f"losses were {straight}, and after loading the checkpoint {resumed}")


CHECKS: dict[str, Callable[[Accelerator], None]] = {
    "processes": _check_processes,
    "collectives": _check_collectives,
    "sharding of data": _check_sharding,
    "one versus many": _check_training,
    "checkpoint": _check_checkpoint,
}
"""The checks by name, in the order in which they run."""


def _model() -> nn.Module:
    # The same weights for all processes and the reference.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _samples(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_STEPS * batch, 8, generator=generator)
    return x.to(device), x.sum(dim=1, keepdim=True).sin().to(device)


def _train(accelerator: Accelerator) -> Iterator[float]:
    """Train on all processes; yields the mean loss over them after each step."""
    accelerator.free_memory()
    model = _model()
    accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    yield from _continue(accelerator, 0)


def _continue(accelerator: Accelerator, first: int) -> Iterator[float]:
    model, optimizer = accelerator.run.prepared.models[-1], accelerator.run.prepared.optimizers[-1]
    x, y = _samples(_BATCH * accelerator.num_processes, accelerator.device)
    for step in range(first, _STEPS):
        start = (step * accelerator.num_processes + accelerator.process_index) * _BATCH
        rows = slice(start, start + _BATCH)
        loss = nn.functional.mse_loss(model(x[rows]).float(), y[rows])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield float(accelerator.reduce(loss.detach(), "mean"))


def _train_alone(device: torch.device, batch: int) -> Iterator[float]:
    model = _model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = _samples(batch, device)
    for start in range(0, len(x), batch):
        loss = nn.functional.mse_loss(model(x[start : start + batch]), y[start : start + batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


@contextmanager
def _shared_folder(accelerator: Accelerator) -> Iterator[str]:
    """A folder that rank 0 creates, and removes when every process is done with it."""
    made = tempfile.TemporaryDirectory() if accelerator.is_main_process else None
    try:
        yield broadcast_object_list([f"{made.name}/state" if made else None])[0]
    finally:
        if made is not None:
            made.cleanup()


def _accelerator() -> Accelerator:
    # The default initial scale would skip the first steps, and the reference has no scaler.
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[GradScalerKwargs(init_scale=1.0)],
    )


def main() -> None:
    """Run every check on this process, and print on the main one what passed and how long it took.

    Raises:
        RuntimeError: If a check finds something wrong; the launcher then ends all processes.
    """
    began = time.perf_counter()
    accelerator = _accelerator()
    process = accelerator.process
    accelerator.print(
        f"{process.world_size} x {process.device.type}, {accelerator.distributed_type}, backend "
        f"{process.backend or 'none'}, mixed precision {accelerator.mixed_precision}, started in "
        f"{time.perf_counter() - began:.2f} s"
    )
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            check(accelerator)
        except Exception:
            print(f"  {name:20} FAILED on rank {process.rank}", flush=True)
            raise
        accelerator.wait_for_everyone()
        accelerator.print(f"  {name:20} passed {time.perf_counter() - start:8.2f} s", flush=True)
    accelerator.print(f"All {len(CHECKS)} checks passed.")
    accelerator.end_training()
    GradientState._reset_state()  # for a program that calls main() and makes an Accelerator after it


if __name__ == "__main__":
    main()
