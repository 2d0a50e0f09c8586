from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.enums import DDPCommunicationHookType


def test_to_kwargs_is_what_differs_from_the_defaults() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    assert AutocastKwargs(enabled=False, cache_enabled=True).to_kwargs() == {
        "enabled": False,
        "cache_enabled": True,
    }
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=8.0, growth_interval=5).to_kwargs() == {
        "init_scale": 8.0,
        "growth_interval": 5,
    }


def test_the_hook_is_no_argument_of_ddp() -> None:
    options = DistributedDataParallelKwargs(static_graph=True, comm_hook="fp16", comm_wrapper="bf16")  # type: ignore[arg-type]

    assert options.comm_hook is DDPCommunicationHookType.FP16
    assert options.to_kwargs() == {"static_graph": True}
    assert set(options.to_dict(ignore_keys=())) - set(options.to_dict()) == {
        "comm_hook",
        "comm_wrapper",
        "comm_state_option",
    }


def test_defaults_are_torchs() -> None:
    torch.amp.GradScaler("cpu", **GradScalerKwargs().to_dict())
    scaler = torch.amp.GradScaler("cpu")

    assert scaler.state_dict() == torch.amp.GradScaler("cpu", **GradScalerKwargs().to_dict()).state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.0}, "init_scale must be greater than 0, not 0.0"),
        ({"growth_factor": 1.0}, "growth_factor must be greater than 1, not 1.0"),
        ({"backoff_factor": 1.5}, "backoff_factor must be between 0 and 1, not 1.5"),
        ({"growth_interval": 0}, "growth_interval must be at least 1, not 0"),
    ],
)
def test_a_scaler_option_out_of_range_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradScalerKwargs(**options)


def test_an_unknown_hook_or_wrapper_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"fp4.*power_sgd"):
        DistributedDataParallelKwargs(comm_hook="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="comm_wrapper must be one of no, fp16, bf16, not 'fp8'"):
        DistributedDataParallelKwargs(comm_wrapper="fp8")  # type: ignore[arg-type]
