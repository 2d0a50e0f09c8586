"""Communication hooks in training: whole runs through the Accelerator, with accumulation, on real workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)

pytestmark = pytest.mark.usefixtures("fresh_state")

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds
POWER = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
KIND = DDPCommunicationHookType


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 12, generator=generator)
    return x, torch.tanh(x @ torch.randn(12, 4, generator=generator))


def train(options: dict[str, Any], accumulation: int) -> tuple[list[float], list[torch.Tensor]]:
    """The loss over all data before and after, and the parameters."""
    handler = DistributedDataParallelKwargs(**options)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, kwargs_handlers=[handler])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.2))
    x, y = data()
    losses = [nn.functional.mse_loss(plain(x), y).item()]
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    for _ in range(60):
        for rows in range(0, 64, 64 // accumulation):
            part = slice(rows, rows + 64 // accumulation)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x[part][share]), y[part][share]))
                optimizer.step()
                optimizer.zero_grad()
    losses.append(nn.functional.mse_loss(plain(x), y).item())
    return losses, [parameter.detach().clone() for parameter in plain.parameters()]


HOOKS: dict[str, tuple[dict[str, Any], float]] = {
    # how far the last loss may be from that without a hook, as a share of it
    "fp16": ({"comm_hook": KIND.FP16}, 1e-4),
    "bf16": ({"comm_hook": KIND.BF16}, 1e-3),
    "fp16-wrapper": ({"comm_wrapper": "fp16"}, 1e-4),
    "bf16-wrapper": ({"comm_wrapper": KIND.BF16}, 1e-3),
    "power": ({"comm_hook": KIND.POWER_SGD, "comm_state_option": POWER}, 0.03),
    "power-fp16": ({"comm_hook": KIND.POWER_SGD, "comm_wrapper": "fp16", "comm_state_option": POWER}, 0.03),
    "power-bf16": ({"comm_hook": KIND.POWER_SGD, "comm_wrapper": "bf16", "comm_state_option": POWER}, 0.03),
    "batched": ({"comm_hook": KIND.BATCHED_POWER_SGD, "comm_state_option": POWER}, 0.05),
}


@pytest.fixture(scope="module")
def without(world):
    return {accumulation: world.run(train, {}, accumulation, timeout_s=SLOW_S)[0] for accumulation in (1, 2)}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", HOOKS)
def test_training_continues_as_without_the_hook(world, without, name, accumulation):
    options, tolerance = HOOKS[name]
    ranks = world.run(train, options, accumulation, timeout_s=SLOW_S)
    (before, after), parameters = ranks[0]
    wanted, plain = without[accumulation]

    assert before == wanted[0]
    assert after == pytest.approx(wanted[1], rel=tolerance)
    assert after < 0.5 * before
    assert not all(torch.equal(*pair) for pair in zip(parameters, plain, strict=True))  # it was at work
    for own, other in zip(parameters, ranks[1][1], strict=True):
        assert torch.equal(own, other)


def test_a_whole_rank_is_no_approximation(world):
    """With the rank of the matrices PowerSGD is exact, so its state options reach it."""
    options = {**POWER, "matrix_approximation_rank": 12, "min_compression_rate": 0.01}
    full = {"comm_hook": "power_sgd", "comm_state_option": options}
    (_, after), _ = world.run(train, full, 1, timeout_s=SLOW_S)[0]
    (_, wanted), _ = world.run(train, {}, 1, timeout_s=SLOW_S)[0]
    (_, low), _ = world.run(train, HOOKS["power"][0], 1, timeout_s=SLOW_S)[0]

    assert after == pytest.approx(wanted, rel=1e-3)
    assert abs(low - wanted) > 10 * abs(after - wanted)


def fp16_run(options: dict[str, Any]) -> tuple[list[bool], float, list[torch.Tensor]]:
    """Nine steps of fp16 training, the sixth of which overflows on one rank."""
    handlers = [DistributedDataParallelKwargs(**options), GradScalerKwargs(init_scale=256.0)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.2))
    x, y = data()
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    skipped = []
    for step in range(9):
        overflows = step == 5 and accelerator.is_main_process
        loss = nn.functional.mse_loss(model(x[share]), y[share])
        accelerator.backward(loss * float("inf") if overflows else loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return skipped, accelerator.scaler.get_scale(), [parameter.detach() for parameter in plain.parameters()]


@pytest.mark.parametrize("name", HOOKS)
def test_one_overflow_in_fp16_is_one_skipped_step_on_all_ranks(world, name):
    ranks = world.run(fp16_run, HOOKS[name][0], timeout_s=SLOW_S)

    for skipped, scale, parameters in ranks:
        assert skipped == [step == 5 for step in range(9)]
        assert scale == 128.0
        assert all(torch.equal(*pair) for pair in zip(parameters, ranks[0][2], strict=True))
