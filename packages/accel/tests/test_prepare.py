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


def test_an_optimizer_of_another_accelerator_is_not_wrapped_twice():
    _, optimizer, *_ = make()
    prepared = Accelerator().prepare(optimizer)

    assert Accelerator().prepare(prepared) is prepared


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
