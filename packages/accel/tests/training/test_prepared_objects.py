"""What became of an object that was passed to `prepare`; a query changes nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.engines.common.loader import EngineLoader
from accel.engines.megatron.engine import MegatronLMEngine
from accel.engines.sharded_engine import ShardedEngine
from accel.engines.single import SingleEngine
from accel.training.prepared_objects import PreparedObjects
from accel.utils import get_fsdp2_grad_scaler
from accel_optim.optimizer import AcceleratedOptimizer
from accel_state.gradient import GradientState
from accel_state.handlers import GradientAccumulationPlugin
from accel_state.step_events import Observer

pytestmark = pytest.mark.usefixtures("fresh_state")


def objects() -> tuple[
    torch.nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler
]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(torch.ones(4, 2), batch_size=2)
    return model, optimizer, data, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def contents(prepared: PreparedObjects) -> list[list[int]]:
    kept = (prepared.models, prepared.optimizers, prepared.schedulers, prepared.loaders, prepared._records)
    return [[id(item) for item in each] for each in kept]


def test_it_finds_what_each_object_became_and_what_it_is():
    accelerator = Accelerator(cpu=True)
    originals = objects()
    results = accelerator.prepare(*originals)
    for original, result in zip(originals, results, strict=True):
        assert accelerator.run.prepared.find(original) is result
        assert accelerator.run.prepared.find(result) is result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when its compiler is imported
def test_it_finds_other_forms_of_a_model_and_an_optimizer():
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = objects()
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    find = accelerator.run.prepared.find
    assert find(torch.compile(model, backend="eager")) is prepared_model
    assert find(accelerator.unwrap_model(prepared_model)) is prepared_model
    assert find(AcceleratedOptimizer(optimizer)) is prepared_optimizer


def test_a_query_changes_nothing():
    accelerator = Accelerator(cpu=True)
    results = accelerator.prepare(*objects())
    before = contents(accelerator.run.prepared)
    for item in (*objects(), *results, None, "text", torch.nn.Linear(2, 1)):
        accelerator.run.prepared.find(item)
    assert contents(accelerator.run.prepared) == before
    assert accelerator.run.prepared.find(None) is None


def test_what_is_prepared_again_is_recorded_once():
    accelerator = Accelerator(cpu=True)
    originals = objects()
    first, second = accelerator.prepare(*originals), accelerator.prepare(*originals)
    assert all(a is b for a, b in zip(first, second, strict=True))
    prepared = accelerator.run.prepared
    assert [len(each) for each in contents(prepared)[:4]] == [1, 1, 1, 1]


def test_originals_of_loaders_are_not_kept():
    accelerator = Accelerator(cpu=True)
    data = DataLoader(torch.ones(4, 2), batch_size=2)
    reference = weakref.ref(data)
    loader = accelerator.prepare(data)
    del data
    gc.collect()
    assert reference() is None
    assert accelerator.run.prepared.find(loader) is loader


def test_nothing_is_found_once_memory_is_freed():
    accelerator = Accelerator(cpu=True)
    originals = objects()
    results = accelerator.prepare(*originals)
    accelerator.free_memory()
    assert [accelerator.run.prepared.find(item) for item in (*originals, *results)] == [None] * 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_copies_find_their_own_objects(copied):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*objects()[:2])
    other = copied(accelerator.run.prepared)
    for item in (*other.models, *other.optimizers):
        assert other.find(item) is item
    assert all(other.find(item) is None for item in accelerator.run.prepared.models)


def test_what_a_program_takes_out_of_the_lists_is_not_found_and_not_kept():
    accelerator = Accelerator(cpu=True)
    originals = objects()
    results = accelerator.prepare(*originals)
    references = [weakref.ref(item) for item in results[2:]]
    accelerator._models.clear()
    accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders = [], [], []
    assert [accelerator.run.prepared.find(item) for item in (*originals, *results)] == [None] * 8
    del results, originals
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class Wrapping(SingleEngine):
    def wrap_loader(self, loader):
        return loader if isinstance(loader, EngineLoader) else Wrapped(loader)


class Wrapped(EngineLoader):
    def __iter__(self):
        yield from self.loader


def test_a_loader_that_an_engine_wraps_is_its_wrapper(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.run.engine = Wrapping(accelerator.engine.context)
    model, _, data, _ = objects()
    model, loader = accelerator.prepare(model, data)
    assert isinstance(loader, Wrapped)
    find = accelerator.run.prepared.find
    assert [find(item) is loader for item in (data, loader, loader.loader)] == [True] * 3
    again = [accelerator.prepare(item) for item in (data, loader, loader.loader)]
    again += [accelerator.prepare(model, item)[1] for item in (data, loader, loader.loader)]
    assert all(item is loader for item in again)
    accelerator.rng_types = []  # which a loader is prepared anew for
    assert accelerator.prepare(loader) is accelerator.prepare(loader.loader) is loader
    assert accelerator._dataloaders == [loader]
    next(iter(loader))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))


def test_a_prepared_loader_that_is_wrapped_later_is_its_wrapper():
    accelerator = Accelerator(cpu=True)
    accelerator.run.engine = Wrapping(accelerator.engine.context)
    model, _, data, _ = objects()
    inner = accelerator.prepare(data)
    _, loader = accelerator.prepare(model, inner)
    assert loader.loader is inner
    assert [accelerator.run.prepared.find(item) is loader for item in (data, inner, loader)] == [True] * 3
    other = Accelerator(cpu=True)
    anew = other.prepare(loader)
    assert isinstance(anew, Wrapped)
    assert other._dataloaders == [anew]
    assert other.run.prepared.find(loader) is other.run.prepared.find(anew) is anew


def test_of_a_loader_that_was_prepared_twice_the_newest_is_found():
    accelerator = Accelerator(cpu=True)
    data = DataLoader(torch.ones(4, 2), batch_size=2)
    accelerator.prepare(data)
    accelerator.dataloader_config.split_batches = True
    second = accelerator.prepare(data)
    assert accelerator.run.prepared.find(data) is second


def test_another_scaler_scales_losses_and_steps_what_is_prepared():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.nn.init.zeros_(model.weight)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[8.0, 8.0]]
    optimizer.step()
    assert model.weight.tolist() == [[-1.0, -1.0]]
    accelerator.scaler = None
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_scaler_that_an_engine_cannot_use_is_refused():
    accelerator = Accelerator(cpu=True)
    for engine, message in [
        (ShardedEngine, r"DTensorGradScaler, got a GradScaler.*accel\.utils\.get_fsdp2_grad_scaler"),
        (MegatronLMEngine, "scales losses itself"),
    ]:
        accelerator.engine.traits = engine.traits
        with pytest.raises(ValueError, match=message):
            accelerator.scaler = torch.amp.GradScaler("cpu")
        assert accelerator.scaler is accelerator.engine.context.scaler is None
        accelerator.scaler = None
    accelerator.engine.traits = ShardedEngine.traits
    accelerator.scaler = scaler = get_fsdp2_grad_scaler()
    assert accelerator.engine.context.scaler is scaler


class Counting(Observer):
    """Counts the steps that it sees."""

    steps = 0

    def after_step(self, optimizer):
        self.steps += 1


def test_another_gradient_state_is_followed_by_all_that_is_prepared():
    observer = Counting()
    accelerator = Accelerator(cpu=True, kwargs_handlers=[observer])
    model, optimizer, loader, scheduler = accelerator.prepare(*objects())
    other = GradientState.new(GradientAccumulationPlugin(num_steps=2))
    accelerator.gradient_state = other
    synced = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            synced.append(
                (other.sync_gradients, accelerator.sync_gradients, other.active_dataloader is loader)
            )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert synced == [(False, False, True), (True, True, True)]
    assert (observer.steps, scheduler.scheduler.last_epoch) == (1, 1)
    accelerator.end_training()
    assert other.events is None


def test_another_gradient_state_is_refused_inside_a_loop_over_a_loader():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(objects()[2])
    before = accelerator.gradient_state
    other = GradientState.new()
    for _ in loader:
        with pytest.raises(ValueError, match="outside of loops over loaders"):
            accelerator.gradient_state = other
        assert accelerator.gradient_state is accelerator.window.gradient_state is before
    accelerator.gradient_state = other
    assert loader.gradient_state is other


@pytest.mark.parametrize(
    "name", ["state", "gradient_state", "window", "engine", "scaler", "trackers", "log_with"]
)
def test_the_parts_of_an_accelerator_can_be_replaced(name):
    accelerator = Accelerator(cpu=True)
    others = {"gradient_state": GradientState.new(), "scaler": torch.amp.GradScaler("cpu")}
    other = others.get(name) or object()
    before = getattr(accelerator, name)
    setattr(accelerator, name, other)
    assert getattr(accelerator, name) is other
    setattr(accelerator, name, before)
