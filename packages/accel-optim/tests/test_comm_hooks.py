from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_optim.handlers import DistributedDataParallelKwargs
from accel_state.enums import DDPCommunicationHookType

SLOW_S = 100  # a worker's first optimizer or DDP imports torch's compiler, which takes seconds
POWER = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5, "matrix_approximation_rank": 1}


def test_a_hook_needs_ddp() -> None:
    with pytest.raises(TypeError, match="got Linear"):
        DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16).register_comm_hook(
            nn.Linear(1, 1)  # type: ignore[arg-type]
        )
    DistributedDataParallelKwargs().register_comm_hook(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_options_without_power_sgd_are_reported() -> None:
    with pytest.warns(UserWarning, match=r"comm_state_option=.* is ignored.*comm_hook is 'no'"):
        DistributedDataParallelKwargs(comm_state_option=POWER).register_comm_hook(nn.Linear(1, 1))  # type: ignore[arg-type]


def _gradients(options: dict[str, Any], steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per step: the gradient that DDP made with the hook, and the exact mean over the ranks."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False)
    wrapped = DistributedDataParallel(model)
    DistributedDataParallelKwargs(**options).register_comm_hook(wrapped)
    size = torch.distributed.get_world_size()
    batches = torch.randn(steps, size, 4, 6, generator=torch.Generator().manual_seed(3))
    seen = []
    for step in range(steps):
        model.zero_grad()
        wrapped(batches[step, torch.distributed.get_rank()]).square().mean().backward()
        exact = torch.stack(
            [
                torch.autograd.grad(model(batches[step, rank]).square().mean(), model.weight)[0]
                for rank in range(size)
            ]
        ).mean(0)
        assert model.weight.grad is not None
        seen.append((model.weight.grad.clone(), exact))
    return seen


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, 1e-6),
        ({"comm_hook": "fp16"}, 1e-3),
        ({"comm_hook": "bf16"}, 1e-2),
        ({"comm_wrapper": "fp16"}, 1e-3),
        ({"comm_wrapper": "bf16"}, 1e-2),
        ({"comm_hook": "fp16", "comm_wrapper": "bf16"}, 1e-2),
        ({"comm_hook": "power_sgd", "comm_state_option": POWER}, 1e-6),
        ({"comm_hook": "batched_power_sgd", "comm_state_option": POWER}, 1e-6),
        ({"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": POWER}, 1e-3),
    ],
    ids=lambda value: (
        "-".join(str(v) for v in value.values() if isinstance(v, str)) or "none"
        if isinstance(value, dict)
        else None
    ),
)
def test_gradients_are_the_mean_as_the_hook_rounds_it(
    world: Any, options: dict[str, Any], error: float
) -> None:
    compressing = "comm_state_option" in options
    ranks = world.run(_gradients, options, 5, timeout_s=SLOW_S)
    for (first, _), (second, _) in zip(*ranks, strict=True):
        assert torch.equal(first, second)
        assert torch.isfinite(first).all()
    gaps = [float((made - exact).abs().max()) for made, exact in ranks[0]]

    # PowerSGD starts after two plain steps, and is then a low-rank approximation.
    plain = gaps[:2] if compressing else gaps
    assert max(plain) <= error
    if compressing:
        assert min(gaps[3:]) > 1e-4
    elif options:
        assert max(gaps) > 1e-6


def _unknown_option() -> str:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    options = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option={"rank": 2}
    )
    with pytest.raises(ValueError, match="comm_state_option") as error:
        options.register_comm_hook(wrapped)
    return str(error.value)


def test_an_unknown_power_sgd_option_is_named(world: Any) -> None:
    message = world.run(_unknown_option, timeout_s=SLOW_S)[0]

    assert "unknown options ['rank']" in message
    assert "matrix_approximation_rank" in message


def _gradients_around_an_overflow(options: dict[str, Any]) -> list[torch.Tensor]:
    """The gradients of eight steps; in the fifth, one process has an inf in a weight and in a bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    wrapped = DistributedDataParallel(model)
    DistributedDataParallelKwargs(**options).register_comm_hook(wrapped)
    rank = torch.distributed.get_rank()
    seen = []
    for step in range(8):
        model.zero_grad()
        factor = float("inf") if step == 4 and rank == 1 else 1.0
        (wrapped(torch.randn(4, 6)).square().mean() * factor).backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return seen


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
@pytest.mark.parametrize("state", [{}, {"warm_start": False}, {"use_error_feedback": False}], ids=str)
def test_an_overflow_is_seen_by_all_and_gone_in_the_next_step(
    world: Any, hook: str, state: dict[str, Any]
) -> None:
    options = {"comm_hook": hook, "comm_state_option": POWER | state}
    first, second = world.run(_gradients_around_an_overflow, options, timeout_s=SLOW_S)

    for step, pair in enumerate(zip(first, second, strict=True)):
        assert [bool(gradients.isfinite().all()) for gradients in pair] == [step != 4] * 2
        assert step == 4 or torch.equal(*pair)
