"""Whole training loops through the Accelerator, against the same loops in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_optim.handlers import GradScalerKwargs
from accel_state.handlers import GradientAccumulationPlugin

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("fresh_state")]

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds
CLOSE: dict[str, float] = {"rtol": 0, "atol": 1e-10}


def layer(seed: int, inputs: int = 3, outputs: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs).double()


def batches(count: int) -> torch.Tensor:
    return torch.randn(count, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def weights(*models: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def generator_loss(generator: nn.Module, critic: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return -critic(generator(batch)).tanh().mean()


def critic_loss(generator: nn.Module, critic: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return critic(generator(batch).detach()).tanh().mean() + critic(batch[:, :2]).square().mean()


def adversaries() -> tuple[list[Any], list[Any], list[Any]]:
    """Two models with an optimizer and a schedule each; the critic's optimizer steps first."""
    models = [layer(1), layer(2, 2, 1)]
    optimizers = [
        torch.optim.Adam(models[0].parameters(), lr=0.01),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.5),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    return models, optimizers, schedules


def plain_adversaries(accumulation: int) -> list[torch.Tensor]:
    models, optimizers, schedules = adversaries()
    for index, batch in enumerate(batches(8)):
        for which, loss_of in ((1, critic_loss), (0, generator_loss)):
            loss = loss_of(*models, batch) / accumulation
            for parameter, gradient in zip(
                models[which].parameters(),
                torch.autograd.grad(loss, list(models[which].parameters())),
                strict=True,
            ):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (index + 1) % accumulation == 0:
            for stepper in (*reversed(optimizers), *schedules):
                stepper.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return weights(*models)


def train_adversaries(accumulation: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """The same through accel, on this process's rows of each batch."""
    plugin = GradientAccumulationPlugin(num_steps=accumulation, step_scheduler_per_process=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, **options)
    plain, optimizers, schedules = adversaries()
    prepared = accelerator.prepare(*plain, *optimizers, *schedules)
    generator, critic, optimizers, schedules = prepared[0], prepared[1], prepared[2:4], prepared[4:]
    rank, size = accelerator.process_index, accelerator.num_processes
    for batch in batches(8):
        own = batch[rank::size]
        with accelerator.accumulate(generator, critic):
            accelerator.backward(critic_loss(generator, critic, own))
            critic.requires_grad_(False)  # the generator's loss runs through it
            accelerator.backward(generator_loss(generator, plain[1], own))
            critic.requires_grad_(True)
            for stepper in (*reversed(optimizers), *schedules):
                stepper.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert [schedule.scheduler.last_epoch for schedule in schedules] == [8 // accumulation] * 2
    return weights(*plain)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_models_and_optimizers_in_one_loop(accumulation):
    for made, wanted in zip(
        train_adversaries(accumulation, {}), plain_adversaries(accumulation), strict=True
    ):
        torch.testing.assert_close(made, wanted, **CLOSE)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_models_and_optimizers_on_two_processes(world, accumulation):
    wanted = plain_adversaries(accumulation)
    for rank in world.run(train_adversaries, accumulation, {}, timeout_s=SLOW_S):
        for made, expected in zip(rank, wanted, strict=True):
            torch.testing.assert_close(made, expected, **CLOSE)


def least_squares() -> list[torch.Tensor]:
    accelerator, plain = Accelerator(), layer(1)
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=5)
    model, optimizer = accelerator.prepare(plain, optimizer)
    rank, size = accelerator.process_index, accelerator.num_processes
    for batch in batches(3):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch[rank::size]) - 1).square().mean()
            accelerator.backward(loss)
            return accelerator.reduce(loss.detach(), "mean")

        optimizer.step(closure)
    return weights(plain)


def test_lbfgs_with_a_closure(world):
    plain = layer(1)
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=5)
    for batch in batches(3):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (plain(batch) - 1).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)

    assert all(torch.equal(*pair) for pair in zip(least_squares(), weights(plain), strict=True))
    for rank in world.run(least_squares, timeout_s=SLOW_S):
        for made, wanted in zip(rank, weights(plain), strict=True):
            torch.testing.assert_close(made, wanted, **CLOSE)


def test_a_group_added_later_trains_and_is_saved(tmp_path):
    def make(groups: int) -> tuple[Accelerator, nn.Module, Any]:
        accelerator, model = Accelerator(), nn.Sequential(layer(1, 3, 3), layer(2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if groups == 2:
            thaw(model, optimizer)
        return accelerator, model, optimizer

    def thaw(model: Any, optimizer: Any) -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    first = make(1)
    before = first[1][0].weight.detach().clone()
    step(*first, batches(3)[0])
    assert torch.equal(first[1][0].weight, before)
    thaw(*first[1:])
    step(*first, batches(3)[1])
    assert not torch.equal(first[1][0].weight, before)
    first[0].save_state(str(tmp_path))
    second = make(2)
    second[0].load_state(str(tmp_path))
    for run in (first, second):
        step(*run, batches(3)[2])

    assert all(torch.equal(*pair) for pair in zip(weights(second[1]), weights(first[1]), strict=True))


def test_a_window_of_three_is_the_plain_loop_bit_for_bit():
    accelerator = Accelerator(gradient_accumulation_steps=3)
    plain, other = layer(1).float(), layer(1).float()
    model = accelerator.prepare(other)
    for batch in batches(3).float():
        (plain(batch).square().mean() / 3).backward()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())

        for a, b in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("tail", [True, False])
def test_the_end_of_a_loader_closes_a_window_if_it_is_to(tail):
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=tail)
    accelerator, model = Accelerator(gradient_accumulation_plugin=plugin), layer(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(10, 3, dtype=torch.float64), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps: list[list[int]] = [[], []]
    for epoch in range(2):
        for index, batch in enumerate(loader):  # five micro-batches
            with accelerator.accumulate(model):
                before = weights(model)
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            if not torch.equal(weights(model)[0], before[0]):
                steps[epoch].append(index)

    assert steps == ([[3, 4], [3, 4]] if tail else [[3], [2]])


def rates(options: dict[str, Any]) -> list[float]:
    accelerator, model = Accelerator(**options), layer(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    seen = []
    for batch in batches(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(schedule.get_last_lr()[0])
    return seen


def test_how_often_a_schedule_moves_is_a_setting_of_the_accelerator(world):
    once = GradientAccumulationPlugin(num_steps=2, step_scheduler_per_process=False)

    assert world.run(rates, {"gradient_accumulation_steps": 2}, timeout_s=SLOW_S)[0] == [
        1,
        0.25,
        0.25,
        0.0625,
    ]
    assert world.run(rates, {"gradient_accumulation_plugin": once}, timeout_s=SLOW_S)[0] == [
        1,
        0.5,
        0.5,
        0.25,
    ]
    assert world.run(rates, {"split_batches": True}, timeout_s=SLOW_S)[0] == [0.5, 0.25, 0.125, 0.0625]
    free = {"step_scheduler_with_optimizer": False}
    assert world.run(rates, free, timeout_s=SLOW_S)[0] == [0.5, 0.25, 0.125, 0.0625]


def overflow_on_one_rank() -> list[tuple[bool, float]]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(
        model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    )
    seen = []
    for index, batch in enumerate(batches(3).float()):
        bad = index == 1 and accelerator.process_index == 1
        accelerator.backward(model(batch).mean() * (float("inf") if bad else 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0]))
    return seen


def test_a_step_skipped_for_one_rank_moves_the_schedule_on_none(world):
    for rank in world.run(overflow_on_one_rank, timeout_s=SLOW_S):
        assert rank == [(False, 0.25), (True, 0.25), (False, 0.0625)]


def fp16_adversaries() -> tuple[Accelerator, list[Any], list[Any]]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**6)])
    models, optimizers, _ = adversaries()
    prepared = accelerator.prepare(*(model.float() for model in models), *optimizers)
    return accelerator, prepared[:2], prepared[2:]


def train_in_fp16(accelerator: Accelerator, models: Any, optimizers: Any, part: slice, bad: int) -> list[Any]:
    """Both losses in turn; that of the generator also writes gradients of the critic, which has stepped."""
    seen = []
    for index, batch in list(enumerate(batches(8).float()))[part]:
        for which, loss_of in ((1, critic_loss), (0, generator_loss)):
            loss = loss_of(*models, batch)
            accelerator.backward(loss * float("inf") if which == 0 and index == bad else loss)
            accelerator.clip_grad_norm_(models[which].parameters(), 1.0)
            optimizers[which].step()
            seen.append(accelerator.optimizer_step_was_skipped)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("bad", [2, 3])
def test_adversaries_in_fp16_continue_from_a_checkpoint(bad, tmp_path):
    run = fp16_adversaries()
    seen = train_in_fp16(*run, slice(0, 4), bad)
    # the last step of any optimizer counts: that of the generator, until it has stepped again
    assert seen == [index in (2 * bad + 1, 2 * bad + 2) for index in range(8)]
    run[0].save_state(str(tmp_path))
    assert run[0].scaler.get_scale() == 2.0**5
    resumed = fp16_adversaries()
    train_in_fp16(*resumed, slice(0, 1), 0)  # its own overflow is not that of the checkpoint
    resumed[0].load_state(str(tmp_path))
    for each in (run, resumed):
        train_in_fp16(*each, slice(4, 8), -1)

    assert resumed[0].scaler.state_dict() == run[0].scaler.state_dict()
    assert all(torch.equal(*pair) for pair in zip(weights(*resumed[1]), weights(*run[1]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [2, 3, 7, 10, 49])
def test_the_gradient_of_a_mean_loss_is_that_of_a_division_to_the_last_bit(
    steps: int, dtype: torch.dtype
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(layer(0).to(dtype))
    batch = batches(1)[0].to(dtype)
    seen: list[torch.Tensor] = []
    for divided in (True, False):
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.register_hook(seen.append)
        with accelerator.accumulate(model):
            if divided:
                (loss / steps).backward()
            else:
                accelerator.backward(loss)
        seen += [parameter.grad.clone() for parameter in model.parameters()]

    assert all(map(torch.equal, seen[:3], seen[3:]))
    assert len(seen) == 6


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_of_several_numbers_gets_the_message_of_torch(steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(layer(0))

    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        accelerator.backward(model(batches(1)[0]))
    accelerator.backward(model(batches(1)[0]), gradient=torch.ones(8, 2, dtype=torch.float64))
