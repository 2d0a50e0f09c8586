"""prepare: order, placement, idempotence, and objects that it does not know."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel.accelerator import Accelerator
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler

pytestmark = pytest.mark.usefixtures("fresh_state")


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_objects_come_back_in_the_order_given():
    model, optimizer, loader, scheduler = make()

    s, ld, o, m = Accelerator().prepare(scheduler, loader, optimizer, model)

    assert isinstance(s, AcceleratedScheduler)
    assert isinstance(ld, DataLoader)
    assert isinstance(o, AcceleratedOptimizer)
    assert m is model
    assert s.optimizers == [o]


def test_preparing_twice_is_preparing_once():
    accelerator = Accelerator(mixed_precision="bf16")
    raw = make()
    once = accelerator.prepare(*raw)

    twice = accelerator.prepare(*once)
    from_raw = accelerator.prepare(raw[0], raw[1], raw[3])

    assert all(a is b for a, b in zip(once, twice, strict=True))
    assert from_raw[0] is once[0]
    assert from_raw[1] is once[1]
    assert from_raw[2] is once[3]
    assert (len(accelerator._models), len(accelerator._optimizers)) == (1, 1)
    assert (len(accelerator._schedulers), len(accelerator._dataloaders)) == (1, 1)


def test_one_object_given_twice_in_a_call_is_prepared_once():
    accelerator = Accelerator()
    model, optimizer, *_ = make()

    a, b, c, d = accelerator.prepare(model, model, optimizer, optimizer)

    assert a is b
    assert c is d
    assert (len(accelerator._models), len(accelerator._optimizers)) == (1, 1)


def test_single_object_comes_back_bare_and_each_kind_has_its_method():
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = make()

    assert accelerator.prepare(model) is model
    assert isinstance(accelerator.prepare_optimizer(optimizer), AcceleratedOptimizer)
    assert isinstance(accelerator.prepare_scheduler(scheduler), AcceleratedScheduler)
    assert isinstance(accelerator.prepare_data_loader(loader), DataLoader)
    assert accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True).training


def test_what_another_accelerator_prepared_follows_the_window_of_the_new_one():
    first, second = Accelerator(), Accelerator(gradient_accumulation_steps=4)
    before = first.prepare(*make())
    model, optimizer, loader, scheduler = second.prepare(*before)

    assert optimizer is not before[1]
    assert optimizer.optimizer is before[1].optimizer
    assert scheduler.scheduler is before[3].scheduler
    assert scheduler.optimizers == [optimizer]
    rates = []
    for batch in loader:
        assert second.gradient_state.active_dataloader is loader
        with second.accumulate(model):
            weight = model.weight.clone()
            second.backward(model(batch[0]).sum())
            optimizer.step()
            scheduler.step()
            rates.append((torch.equal(weight, model.weight), scheduler.get_last_lr()[0]))
    assert rates == [(True, 0.1), (False, pytest.approx(0.01))]  # the loader's end closes the window
    again = second.prepare(model, optimizer, loader, scheduler)
    assert all(a is b for a, b in zip(again, (model, optimizer, loader, scheduler), strict=True))
    for _ in before[2]:
        assert first.gradient_state.active_dataloader is before[2]
        assert second.gradient_state.active_dataloader is None


def test_a_scheduler_follows_its_own_optimizer_whichever_is_prepared_first():
    accelerator = Accelerator()
    _, optimizer, _, scheduler = make()
    _, other, *_ = make()
    early = accelerator.prepare(scheduler)
    wrapped, second = accelerator.prepare(optimizer, other)
    late = accelerator.prepare(torch.optim.lr_scheduler.StepLR(second, 1))

    assert early.optimizers == [wrapped]
    assert late.optimizers == [second]


def test_unknown_objects_pass_with_a_warning_then_are_refused():
    accelerator = Accelerator()
    stranger = object()

    with pytest.warns(UserWarning, match="object, which it does not prepare"):
        _, same, nothing = accelerator.prepare(torch.nn.Linear(1, 1), stranger, None)

    assert same is stranger
    assert nothing is None
    with pytest.raises(TypeError, match="object a second time"):
        accelerator.prepare(stranger)


def test_device_placement_has_one_entry_per_object():
    model, optimizer, loader, _ = make()
    accelerator = Accelerator()

    with pytest.raises(ValueError, match=r"2 objects and a device_placement of 1"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    prepared = accelerator.prepare(model, optimizer, loader, device_placement=[False, None, False])
    assert len(prepared) == 3
