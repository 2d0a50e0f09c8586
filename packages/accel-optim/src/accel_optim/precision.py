"""Mixed precision contexts: the compute dtype of a precision, as torch's autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from accel_state.devices.table import device_spec
from accel_state.enums import PrecisionType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_optim.handlers import AutocastKwargs

# fp8 kernels replace single layers; the rest computes in bf16.
_COMPUTE: Mapping[str, tuple[str, torch.dtype]] = {
    "fp16": ("fp16", torch.float16),
    "bf16": ("bf16", torch.bfloat16),
    "fp8": ("bf16", torch.bfloat16),
}


def autocast(
    device_type: str, precision: PrecisionType | str, kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Make the context in which operations compute in a precision.

    Args:
        device_type: Type of the device that computes ("cuda", "cpu" ...).
        precision: "no", "fp16", "bf16" or "fp8". "fp8" autocasts layers without fp8 kernels to bf16.
        kwargs: `enabled=False` makes a block in full precision, also inside another autocast context;
            `cache_enabled` says whether casts of weights are kept within the context (None: torch's default).

    Returns:
        A context manager, for one use. With "no" it changes nothing.

    Raises:
        ValueError: If the precision is unknown, or the device has no autocast to it.
    """
    # A direct look-up is faster than creating an enumeration member.
    compute = _COMPUTE.get(precision) or _COMPUTE.get(PrecisionType(precision))
    if kwargs is not None and not kwargs.enabled:
        # Not a nullcontext, inside which an outer autocast would stay on.
        return torch.autocast(device_type, enabled=False)
    if compute is None:
        return nullcontext()
    needed, dtype = compute
    allowed = device_spec(device_type).autocast_dtypes
    if needed not in allowed:
        raise ValueError(
            f"mixed_precision={str(precision)!r} is not possible: {needed} autocast is not supported on "
            f"{device_type!r}; supported: {sorted(allowed) or 'none'}. Choose one of these or "
            "mixed_precision='no'."
        )
    return torch.autocast(device_type, dtype=dtype, cache_enabled=kwargs.cache_enabled if kwargs else None)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Make the autocast context of the current AcceleratorState's device and precision.

    Args:
        native_amp: Whether mixed precision is on; when False the context changes nothing.
        autocast_kwargs: Options of the context.

    Returns:
        A context manager, for one use.
    """
    if not native_amp:
        return nullcontext()
    from accel_state.accelerator_state import AcceleratorState

    state = AcceleratorState()
    return autocast(state.device.type, state.mixed_precision, autocast_kwargs)
