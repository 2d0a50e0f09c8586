from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from accel_optim.handlers import AutocastKwargs
from accel_optim.precision import autocast, get_mixed_precision_context_manager

pytestmark = pytest.mark.usefixtures("fresh_state")


def computed(context: object) -> torch.dtype:
    with context:  # type: ignore[attr-defined]
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("no", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)],
)
def test_operations_compute_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    assert computed(autocast("cpu", precision)) == dtype
    assert computed(autocast("cpu", precision, AutocastKwargs())) == dtype


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_enabled_false_is_full_precision_also_inside_autocast(precision: str) -> None:
    with autocast("cpu", "bf16"):
        assert computed(nullcontext()) == torch.bfloat16
        assert computed(autocast("cpu", precision, AutocastKwargs(enabled=False))) == torch.float32


def test_cache_enabled_reaches_torch() -> None:
    before = torch.is_autocast_cache_enabled()
    for wanted in (True, False):
        with autocast("cpu", "bf16", AutocastKwargs(cache_enabled=wanted)):
            assert torch.is_autocast_cache_enabled() is wanted
    assert torch.is_autocast_cache_enabled() is before


def test_an_unknown_precision_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"fp4.*bf16"):
        autocast("cpu", "fp4")


def test_a_precision_that_the_device_has_not_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"mixed_precision='fp16' .* not supported on 'xla'; supported: \['bf16'\]"
    ):
        autocast("xla", "fp16")


def test_the_current_states_precision() -> None:
    from accel_state.accelerator_state import AcceleratorState

    AcceleratorState(mixed_precision="bf16", cpu=True, _from_accelerator=True)

    assert computed(get_mixed_precision_context_manager(native_amp=True)) == torch.bfloat16
    assert computed(get_mixed_precision_context_manager()) == torch.float32
    off = AutocastKwargs(enabled=False)
    assert computed(get_mixed_precision_context_manager(True, off)) == torch.float32
