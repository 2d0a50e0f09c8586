"""Nothing of accel is in a cycle: what is dropped is freed at once, and an Accelerator can be copied."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel.accelerator import Accelerator
from accel.engines.deepspeed.plugin import DeepSpeedPlugin
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel.utils import DataLoaderConfiguration
from accel_state.parallelism.config import ParallelismConfig

pytestmark = pytest.mark.usefixtures("fresh_state")


class Net(torch.nn.Sequential):
    _tp_plan: ClassVar = {"0": "colwise", "2": "rowwise"}

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.data = torch.randn(16, 4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.data)


CASES: dict[str, dict[str, Any]] = {
    "a whole epoch": {},
    "windows": {"gradient_accumulation_steps": 2},
    "weights": {"gradient_accumulation_steps": 2, "weight": 2.0},
    "a loop that was left": {"stop": 1},
    "bf16": {"mixed_precision": "bf16"},
    "a stream from process 0": {"dataset": Stream},
    "a stream from process 0, left": {"dataset": Stream, "stop": 1},
    "a stream in shares": {"dataset": Stream, "config": {"dispatch_batches": False}},
    "batches from process 0": {"config": {"dispatch_batches": True}},
    "workers": {"workers": 1},
}

_FSDP: dict[str, dict[str, Any]] = {
    "fsdp1": {"fsdp_version": 1},
    "fsdp2": {"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 1},
}


def options_for(engine: str) -> dict[str, Any]:
    if engine in _FSDP:
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(**_FSDP[engine])}
    if engine == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    if engine == "deepspeed":
        return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}
    return {}


def alive_after(
    engine: str = "single",
    dataset: Any = None,
    config: dict[str, Any] | None = None,
    workers: int = 0,
    stop: int | None = None,
    weight: float | None = None,
    **options: Any,
) -> list[str]:
    """Train, drop everything, and name what is still there."""
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(**config or {}), **options, **options_for(engine)
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.randn(16, 4) if dataset is None else dataset(), 2, num_workers=workers)
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    kept = {name: weakref.ref(item) for name, item in given.items()}
    del given
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    kept["registered"] = weakref.ref(counter)
    accelerator.register_for_checkpointing(counter)
    hook = accelerator.register_save_state_pre_hook(Counter().hook)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square()
            accelerator.backward(loss.mean() if weight is None else loss.sum(), weight=weight)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics({"loss": [loss.detach().mean().reshape(1)], "text": "seen"})
        if number == stop:
            break
    prepared = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    kept.update((f"prepared {name}", weakref.ref(item)) for name, item in prepared.items())
    kept.update((f"parameter {index}", weakref.ref(item)) for index, item in enumerate(model.parameters()))
    kept.update(accelerator=weakref.ref(accelerator), engine=weakref.ref(accelerator.engine))
    kept.update(loss=weakref.ref(loss), batch=weakref.ref(batch))
    del prepared, accelerator, model, optimizer, scheduler, loader, counter, hook, loss, batch
    return [name for name, reference in kept.items() if reference() is not None]


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def hook(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(engine: str, cases: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DeepSpeed
        alive_after(engine)  # what the first steps import leaves frames in cycles
        found = {}
        for name, case in cases.items():
            with no_collector():
                found[name] = alive_after(engine, **case)
        return found


@pytest.mark.parametrize("case", CASES)
def test_one_process_frees_everything_at_once(case):
    assert alive("single", {case: CASES[case]}) == {case: []}


@pytest.mark.long
def test_data_parallel_processes_free_everything_at_once(world):
    for found in world.run(alive, "ddp", CASES):
        assert found == {case: [] for case in CASES}


# torch's FullyShardedDataParallel and fully_shard hold their modules in cycles, and DeepSpeed its engine,
# whatever uses them: the model waits for the garbage collector, and nothing of ours holds it.
THEIRS = {
    "fsdp1": ("model", "parameter"),
    "fsdp2": ("model", "parameter"),
    "tp": ("model", "parameter"),
    "deepspeed": ("model", "parameter", "optimizer", "scheduler", "prepared model"),
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", THEIRS)
def test_what_other_libraries_hold_is_theirs_alone(engine, world):
    cases = {name: CASES[name] for name in ("a whole epoch", "bf16", "a loop that was left")}
    for found in world.run(alive, engine, cases, timeout_s=250):
        left = {name for names in found.values() for name in names}
        print(engine, left)
        ours = {name for name in left if not name.removeprefix("prepared ").startswith(THEIRS[engine])}
        assert not ours


def test_walking_nested_data_keeps_nothing():
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare_model(Net())
    kept = []
    model[2].register_forward_hook(lambda *args: kept.append(weakref.ref(args[2])))
    with no_collector():
        assert model(torch.randn(2, 4)).dtype is torch.float32
        assert kept[0]() is None  # the result in bfloat16, and with it what its backward pass needs


def run(copied: Any) -> list[float]:
    """Train two epochs with the objects that an Accelerator holds itself."""
    (model,), (optimizer,), (scheduler,) = (
        copied.run.prepared.models,
        copied.run.prepared.optimizers,
        copied.run.prepared.schedulers,
    )
    losses = []
    for _ in range(2):
        for batch in copied._dataloaders[0]:
            with copied.accumulate(model):
                loss = model(batch).square().mean()
                copied.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_copy_trains_as_the_accelerator_does(way, in_loop, precision):
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(torch.randn(16, 4), 4)
    loader = accelerator.prepare(loader, model, optimizer, scheduler)[0]
    for _ in loader if in_loop else ():
        copied = way(accelerator)
        break
    else:
        copied = way(accelerator)
    Accelerator(gradient_accumulation_steps=7)  # the newest, which the copy does not follow

    assert copied.run.prepared.models[0] is not accelerator.run.prepared.models[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.. before .optimizer.step")  # of copies
        assert run(copied) == run(accelerator)
    assert len(set(run(copied))) > 4


def test_a_shallow_copy_shares_everything():
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model := Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    other = copy.copy(accelerator)

    assert other.prepare(model, optimizer) == (model, optimizer)
    assert other.engine is accelerator.engine
    assert optimizer.gradient_state is accelerator.gradient_state
