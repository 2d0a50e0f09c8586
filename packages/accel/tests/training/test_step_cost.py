"""A step does nothing that the same plain PyTorch loop does not: counted, not timed."""

from __future__ import annotations

import builtins
import contextlib
import dis
import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_optim.handlers import GradScalerKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS, WINDOW = 8, 4
WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_to_cpu"}


class Operations(TorchDispatchMode):
    """Counts operations that would wait for an accelerator: they hand values of tensors to the host."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["collectives"] += func.namespace == "c10d"  # DDP's own from C++ are among them
        self.counts["waits"] += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def _count_calls(counts: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    reads = {type(os.environ).__getitem__.__code__, type(os.environ).__iter__.__code__}
    searches = {importlib.util.find_spec.__code__, importlib._bootstrap._find_spec.__code__}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts["environment"] += frame.f_code in reads
            counts["searches"] += frame.f_code in searches
            counts["synchronize"] += frame.f_code.co_name == "synchronize"

    return profile


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count imports, module searches, environment reads, waits and collectives."""
    counts: Counter[str] = Counter()
    plain_import, plain_module = builtins.__import__, importlib.import_module

    def counting_import(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        statement = frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_NAME"]  # not called from C
        counts["imports"] += statement and not frame.f_globals["__name__"].startswith("torch")
        return plain_import(*args, **kwargs)

    def counting_module(*args: Any, **kwargs: Any) -> Any:
        counts["imports"] += 1
        return plain_module(*args, **kwargs)

    builtins.__import__, importlib.import_module = counting_import, counting_module
    try:
        with Operations(counts):
            before = sys.getprofile()
            sys.setprofile(_count_calls(counts))
            try:
                yield counts
            finally:
                sys.setprofile(before)
    finally:
        builtins.__import__, importlib.import_module = plain_import, plain_module


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return model, optimizer, scheduler, DataLoader(torch.randn(8 * 3 * STEPS, 3), batch_size=4)


def plain_loop(fp16: bool) -> Callable[[], None]:
    model, optimizer, scheduler, loader = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=fp16)
    if torch.distributed.get_world_size() > 1:
        model = DistributedDataParallel(model)
    batches = iter(loader)

    def run() -> None:
        for number, batch in zip(range(STEPS), batches, strict=False):
            closes = number % WINDOW == WINDOW - 1
            ddp = isinstance(model, DistributedDataParallel)
            with model.no_sync() if ddp and not closes else contextlib.nullcontext():
                with torch.autocast("cpu", torch.float16, enabled=fp16):
                    output = model(batch)
                scaler.scale(output.float().square().mean() / WINDOW).backward()
            if closes:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()

    return run


def accel_loop(fp16: bool, weight: float | None, **options: Any) -> Callable[[], None]:
    accelerator = Accelerator(
        gradient_accumulation_steps=WINDOW,
        mixed_precision="fp16" if fp16 else "no",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        **options,
    )
    model, optimizer, scheduler, loader = parts()
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    batches = iter(loader)

    def run() -> None:
        for _, batch in zip(range(STEPS), batches, strict=False):
            with accelerator.accumulate(model):
                loss = model(batch).square()
                accelerator.backward(loss.mean() if weight is None else loss.sum(), weight=weight)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # inside a window it waits for nothing
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def measure(fp16: bool, weight: float | None) -> tuple[Counter[str], Counter[str]]:
    found = []
    for run in (plain_loop(fp16), accel_loop(fp16, weight)):
        run()  # what happens in the first steps alone is not per step
        with counted() as counts:
            run()
        found.append(counts)
    return found[0], found[1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("weight", [None, 4.0])
def test_a_step_costs_what_the_plain_loop_costs(
    world: Any, size: int, fp16: bool, weight: float | None
) -> None:
    windows = STEPS // WINDOW
    for plain, own in world.run(measure, fp16, weight, size=size):
        added = windows if weight is not None and size > 1 else 0
        assert own["collectives"] == plain["collectives"] + added
        # on the CPU the sum of the weights is read; an accelerator never waits for it
        assert own["waits"] <= plain["waits"] + added
        for name in ("imports", "searches", "environment", "synchronize"):
            assert own[name] <= plain[name], name
        if size > 1:
            assert plain["collectives"] >= windows
        if fp16:
            assert plain["waits"] >= windows


def measure_sharded(fp16: bool) -> Counter[str]:
    run = accel_loop(fp16, 4.0, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    run()
    with counted() as counts:
        run()
    return counts


@pytest.mark.parametrize("fp16", [False, True])
def test_a_step_of_a_sharded_model_looks_nothing_up(world: Any, fp16: bool) -> None:
    for own in world.run(measure_sharded, fp16):
        found = {name: own[name] for name in ("imports", "searches", "environment", "synchronize")}
        assert not any(found.values()), found
        assert own["collectives"] > 0


# A call in Python costs up to a microsecond of a step, as torch's work has emptied the processor's caches.
CALLS = {
    "backward": 3,  # the method, its function and the engine's
    "loss_divisor": 1,
    "clip_grad_norm_": 1,
    "reduce_accumulated": 1,
    "clip_gradients": 1,
    "clip_grad_norm": 2,  # the method's function and the engine's
    "step": 2,  # the optimizer's and the scheduler's
    "step_was_skipped": 1,
    "zero_grad": 1,
}
ACCUMULATING = {
    "accumulate": 2,  # the method and its function
    "__enter__": 1,
    "advance": 1,
    "_next_micro_batch": 1,
    "_set_sync_gradients": 1,
    "__exit__": 1,
}


def test_a_step_on_one_process_makes_few_calls_of_its_own() -> None:
    accelerator = Accelerator()
    model, optimizer, scheduler, _ = parts()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    calls: Counter[str] = Counter()

    def step() -> None:
        accelerator.backward(model(torch.ones(4, 3)).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            step()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        own = event == "call" and frame.f_globals["__name__"].startswith("accel")
        if own and not frame.f_code.co_name.startswith("<"):  # comprehensions are calls before Python 3.12
            calls[frame.f_code.co_name] += 1

    for run, expected in ((step, CALLS), (micro_batch, CALLS | ACCUMULATING)):
        run()  # the first steps are checked for misuse
        run()
        calls.clear()
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(before)
        assert calls == expected


def test_a_step_makes_fewer_calls_than_the_plain_one() -> None:
    """Clipping leaves out more of torch's calls than accel makes, without a scheduler as in the bench."""
    plain_model, plain_optimizer, _, _ = parts()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*parts()[:2])

    def plain() -> None:
        plain_model(torch.ones(4, 3)).mean().backward()
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def own() -> None:
        accelerator.backward(model(torch.ones(4, 3)).mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    counts = []
    for step in (plain, own):
        step()
        step()
        events: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: events.append(event))  # noqa: B023
        try:
            step()
        finally:
            sys.setprofile(before)
        counts.append(events.count("call"))
    assert counts[1] < counts[0]


def test_what_is_counted_is_seen() -> None:
    for _ in range(2):  # torch imports more of itself when operations are first watched
        with counted() as counts:
            import json  # noqa: F401

            importlib.import_module("json")
            importlib.util.find_spec("json")
            os.environ.get("HOME")
            float(torch.ones(()))
            torch.cpu.synchronize()

    assert counts == Counter({"imports": 2, "searches": 1, "environment": 1, "waits": 1, "synchronize": 1})
