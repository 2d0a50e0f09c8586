"""prepare: order, placement, idempotence, and objects that it does not know."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from accel.accelerator import Accelerator
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_data.config import DataLoaderConfiguration
from accel_ops.rng import set_seed
from accel_optim.optimizer import AcceleratedOptimizer
from accel_optim.scheduler import AcceleratedScheduler
from accel_state.accelerator_state import AcceleratorState
from accel_state.parallelism.config import ParallelismConfig

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]


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
    assert (len(accelerator.run.prepared.models), len(accelerator.run.prepared.optimizers)) == (1, 1)
    assert (len(accelerator.run.prepared.schedulers), len(accelerator.run.prepared.loaders)) == (1, 1)


def test_a_prepared_model_says_so():
    accelerator = Accelerator()
    evaluated, trained, raw = (torch.nn.Linear(2, 1) for _ in range(3))

    accelerator.prepare_model(evaluated, evaluation_mode=True)
    accelerator.prepare(trained)

    assert evaluated._is_accelerate_prepared
    assert trained._is_accelerate_prepared
    assert not hasattr(raw, "_is_accelerate_prepared")


def test_every_prepared_object_says_so():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(range(4))
    raw = (model, optimizer, schedule, loader)
    assert not any(hasattr(item, "_is_accelerate_prepared") for item in raw)

    assert all(item._is_accelerate_prepared for item in accelerator.prepare(*raw))
    assert not any(hasattr(item, "_is_accelerate_prepared") for item in (optimizer, schedule, loader))


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler", "data_loader"])
def test_after_a_reset_nothing_is_prepared(kind):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    given = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "data_loader": torch.utils.data.DataLoader(range(4)),
    }[kind]
    AcceleratorState._reset_state()

    for prepare in (accelerator.prepare, getattr(accelerator, f"prepare_{kind}")):
        with pytest.raises(AttributeError, match=r"_reset_state\(\) was called"):
            prepare(given)
    Accelerator()  # another state
    assert accelerator.prepare(given)._is_accelerate_prepared


def wrapped_when_it_trains() -> list[bool]:
    """A model that is wrapped only when it is prepared a second time."""
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    model.requires_grad_(False)
    frozen = accelerator.prepare(model)
    model.requires_grad_(True)
    training = accelerator.prepare(model)
    return [training is frozen, frozen._is_accelerate_prepared, training._is_accelerate_prepared]


def test_a_model_that_is_wrapped_later_says_so_too(world):
    assert world.run(wrapped_when_it_trains, init=False) == [[False, True, True]] * 2


def test_one_loader_is_prepared_once_for_each_way():
    accelerator = Accelerator()
    *_, raw, _ = make()
    loader = accelerator.prepare(raw)

    assert accelerator.prepare(raw, loader) == (loader, loader)
    assert accelerator.prepare_data_loader(raw, device_placement=False) is not loader
    accelerator.dataloader_config.even_batches = False
    uneven = accelerator.prepare(raw)
    assert uneven is not loader
    assert accelerator.prepare(raw) is uneven
    assert len(accelerator.run.prepared.loaders) == 3
    assert Accelerator().prepare(raw) not in accelerator.run.prepared.loaders
    accelerator.free_memory()
    assert accelerator.prepare(raw) not in (loader, uneven)
    assert len(accelerator.run.prepared.loaders) == 1


def test_loaders_have_the_same_orders_after_free_memory():
    accelerator = Accelerator()
    torch.manual_seed(1)

    def orders():
        loaders = accelerator.prepare(*(DataLoader(range(50), 5, shuffle=True) for _ in range(2)))
        return [torch.cat(list(loader)).tolist() for loader in loaders]

    first = orders()
    assert orders() != first
    accelerator.free_memory()
    assert orders() == first


def test_one_object_given_twice_in_a_call_is_prepared_once():
    accelerator = Accelerator()
    model, optimizer, *_ = make()

    a, b, c, d = accelerator.prepare(model, model, optimizer, optimizer)

    assert a is b
    assert c is d
    assert (len(accelerator.run.prepared.models), len(accelerator.run.prepared.optimizers)) == (1, 1)


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


def losses_with_a_wrapper_of_the_users(version: int | None) -> list[float]:
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    own = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    schedule = torch.optim.lr_scheduler.StepLR(own.optimizer, 1000)
    model, optimizer, scheduler = accelerator.prepare(model, own, AcceleratedScheduler(schedule, own))
    assert scheduler.optimizers == [optimizer]
    losses = []
    for _ in range(8):
        with accelerator.accumulate(model):
            loss = (model(torch.ones(2, 4)) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    return losses


def test_an_optimizer_that_the_user_wrapped_is_prepared_as_any_other(world):
    (expected,) = world.run(losses_with_a_wrapper_of_the_users, None, size=1)
    assert expected[-1] < 0.3 * expected[0]
    for version in (None, 1, 2):
        assert world.run(losses_with_a_wrapper_of_the_users, version) == [expected] * 2


def test_a_wrapper_with_methods_of_the_users_is_rejected():
    class Counting(AcceleratedOptimizer):
        def step(self, closure=None):
            raise NotImplementedError

    accelerator = Accelerator()
    model, optimizer, *_ = make()
    with pytest.raises(TypeError, match=r"got a Counting, a subclass of Accelerated.* `\.optimizer`"):
        accelerator.prepare(model, Counting(optimizer))
    assert (accelerator.run.prepared.models, accelerator.run.prepared.optimizers) == ([], [])


def test_asking_for_an_optimizer_prepares_none():
    accelerator = Accelerator(mixed_precision="fp16")
    own = AcceleratedOptimizer(make()[1])
    with pytest.raises(ValueError, match="not prepared"):
        accelerator.unscale_gradients(own)
    assert accelerator.run.prepared.optimizers == []


def test_a_scheduler_follows_its_own_optimizer_whichever_is_prepared_first():
    accelerator = Accelerator()
    _, optimizer, _, scheduler = make()
    _, other, *_ = make()
    early = accelerator.prepare(scheduler)
    wrapped, second = accelerator.prepare(optimizer, other)
    late = accelerator.prepare(torch.optim.lr_scheduler.StepLR(second, 1))

    assert early.optimizers == [wrapped]
    assert late.optimizers == [second]


def test_unknown_objects_come_back_as_often_as_they_are_given_with_one_warning():
    accelerator = Accelerator()
    stranger, other = object(), object()

    with pytest.warns(UserWarning, match="returned objects unchanged: int, object, str\\.") as told:
        _, same, nothing, *_ = accelerator.prepare(torch.nn.Linear(1, 1), stranger, None, 1, "a", 2)
    assert len(told) == 1

    assert same is stranger
    assert nothing is None
    assert accelerator.prepare(stranger) is stranger  # another warning would be an error
    accelerator.free_memory()
    assert accelerator.prepare(stranger, other, stranger) == (stranger, other, stranger)


def test_device_placement_has_one_entry_per_object():
    model, optimizer, loader, _ = make()
    accelerator = Accelerator()

    with pytest.raises(ValueError, match=r"2 objects and a device_placement of 1"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    prepared = accelerator.prepare(model, optimizer, loader, device_placement=[False, None, False])
    assert len(prepared) == 3


def order_of(data_seed: int | None) -> list[int]:
    loader = DataLoader(torch.arange(64), batch_size=64, shuffle=True)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=data_seed)
    (batch,) = Accelerator(dataloader_config=config).prepare(loader)
    return batch.tolist()


def test_the_seed_of_the_loader_configuration_decides_the_order():
    torch.manual_seed(0)
    orders = [order_of(7), order_of(7), order_of(8)]

    assert orders[0] == orders[1] != orders[2]


def test_the_order_of_the_loader_configuration_takes_a_dataset_of_any_length():
    torch.manual_seed(0)
    length = 10**10
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(order="keyed", data_seed=7))
    loader = accelerator.prepare(DataLoader(range(length), batch_size=4, shuffle=True))
    seen = [batch.tolist() for batch, _ in zip(loader, range(3), strict=False)]
    (rest,) = (batch.tolist() for batch in accelerator.skip_first_batches(loader, len(loader) - 1))

    assert len(loader) == length // 4
    assert len({index for batch in [*seen, rest] for index in batch}) == 16
    assert accelerator.prepare_data_loader(DataLoader(range(9), shuffle=True)).get_sampler().is_keyed
    assert not Accelerator().prepare(DataLoader(range(9), shuffle=True)).get_sampler().is_keyed
    with pytest.raises(ValueError, match="order must be 'torch', 'keyed' or None, but it is 'fast'"):
        DataLoaderConfiguration(order="fast")


def test_placement_is_the_accelerators_unless_the_call_says_otherwise():
    loader = DataLoader(torch.arange(4))
    config = DataLoaderConfiguration(non_blocking=True)
    placing = Accelerator(dataloader_config=config)
    leaving = Accelerator(device_placement=False)

    assert placing.prepare(loader).device == placing.device
    assert placing.prepare(loader)._non_blocking
    assert placing.prepare_data_loader(loader, device_placement=False).device is None
    assert leaving.prepare(loader).device is None
    assert not leaving.prepare(loader)._non_blocking
    assert leaving.prepare(loader, device_placement=[True]).device == leaving.device
    model = torch.nn.Linear(1, 1, device="meta")  # cannot be moved: placing it is an error
    assert leaving.prepare(model) is model
    with pytest.raises(NotImplementedError, match="meta"):
        placing.prepare(torch.nn.Linear(1, 1, device="meta"))
    assert placing.prepare(model, device_placement=[False]) is model


def draws_after_a_first_batch(rng_types: list[str] | None) -> float:
    accelerator = Accelerator(rng_types=rng_types)
    loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    torch.manual_seed(accelerator.process_index)
    for _ in loader:
        return torch.rand(()).item()
    raise AssertionError("the loader is empty")


def test_the_generators_of_rng_types_are_synchronised_and_no_others(world):
    first, second = world.run(draws_after_a_first_batch, ["torch"])
    assert first == second

    first, second = world.run(draws_after_a_first_batch, None)
    assert first != second


def in_reverse(batch, part, process_index=None, num_processes=None):
    """Hand out the parts in the reverse order."""
    size = len(batch) // num_processes
    place = num_processes - 1 - process_index
    return batch[place * size : (place + 1) * size]


def sliced_in_reverse() -> list[int]:
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    accelerator = Accelerator(dataloader_config=config)
    loader = DataLoader(torch.arange(8), batch_size=4)
    loader = accelerator.prepare_data_loader(loader, slice_fn_for_dispatch=in_reverse)
    return torch.cat([*loader]).tolist()


def test_a_slice_function_divides_dispatched_batches(world):
    assert world.run(sliced_in_reverse) == [[2, 3, 6, 7], [0, 1, 4, 5]]


def moves_per_step(split_batches: bool) -> int:
    accelerator = Accelerator(split_batches=split_batches)
    model, optimizer, _, scheduler = make()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    optimizer.step()
    scheduler.step()
    return scheduler.scheduler.last_epoch


@pytest.mark.parametrize(("split_batches", "moves"), [(False, 2), (True, 1)])
def test_a_schedule_moves_as_fast_as_the_data_is_used_up(world, split_batches, moves):
    assert world.run(moves_per_step, split_batches) == [moves, moves]


@pytest.mark.parametrize(("step_with_optimizer", "moves"), [(True, 0), (False, 1)])
def test_a_schedule_moves_inside_a_window_only_on_request(step_with_optimizer, moves):
    accelerator = Accelerator(
        gradient_accumulation_steps=2, step_scheduler_with_optimizer=step_with_optimizer
    )
    model, optimizer, _, scheduler = make()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with accelerator.accumulate(model):
        optimizer.step()
        if not step_with_optimizer:
            optimizer.optimizer.step()  # torch warns of a schedule that moves before its optimizer
        scheduler.step()

    assert scheduler.scheduler.last_epoch == moves


SAMPLINGS = {
    "shuffled": lambda: {"shuffle": True},
    "a sampler that draws from the global generator": lambda: {
        "sampler": WeightedRandomSampler([1.0] * 24, 24)
    },
    "its own generator": lambda: {"sampler": RandomSampler(range(24), generator=torch.Generator())},
}


def batches_under(sizes: dict[str, int], kind: str) -> list[list[int]]:
    """What this process reads in two epochs, where each process is seeded by its rank."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes))
    set_seed(7, device_specific=True)
    sampling = SAMPLINGS[kind]()
    if "sampler" in sampling and getattr(sampling["sampler"], "generator", None) is not None:
        sampling["sampler"].generator.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(24), batch_size=4, **sampling))
    return [[index for batch in loader for index in batch.tolist()] for _ in range(2)]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_processes_that_split_a_model_read_the_same_batches(world, kind):
    first, second = world.run(batches_under, {"tp_size": 2}, kind)

    assert first == second
    assert first[0] != first[1]


def test_groups_that_split_a_model_divide_the_data(world):
    sizes = {"dp_shard_size": 2, "tp_size": 2}
    first, second, third, fourth = world.run(batches_under, sizes, "shuffled", size=4)

    assert (first, third) == (second, fourth)
    assert sorted(first[0] + third[0]) == list(range(24))


class InOrder:
    """A sampler of a class that the library does not know."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def unlike_orders() -> str:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    own_order = torch.randperm(24, generator=torch.Generator().manual_seed(accelerator.process_index))
    loader = accelerator.prepare(DataLoader(range(24), sampler=InOrder(own_order.tolist())))
    with pytest.raises(RuntimeError, match="does not give the same order on every process") as error:
        next(iter(loader))
    return str(error.value)


def test_other_orders_on_processes_that_split_a_model_are_rejected_on_all(world):
    first, second = world.run(unlike_orders)

    assert first == second
