"""Mixed precision as a wrapper of one module's forward: autocast inside, fp32 outputs outside by default."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from accel_ops.modules import extract_model_from_parallel, weak_forward
from accel_ops.trees.convert import convert_outputs_to_fp32
from accel_optim.handlers import AutocastKwargs
from accel_optim.precision import autocast
from accel_state.enums import PrecisionType
from accel_state.logging.warning import warn


@dataclass(frozen=True)
class Precision:
    """The compute precision of one Accelerator.

    Attributes:
        name: "no", "fp16" or "bf16".
        autocast: Options of the autocast contexts; None: the defaults.
    """

    name: str = "no"
    autocast: AutocastKwargs | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether operations run in a lower precision than the parameters."""
        return self.name != PrecisionType.NO.value

    @property
    def converts_outputs(self) -> bool:
        """Whether outputs become fp32."""
        return self.autocast is None or self.autocast.convert_outputs_to_fp32


class AutocastForward:
    """A module's forward under autocast; a class, and not a closure, so that the module still pickles."""

    def __init__(self, module: torch.nn.Module, precision: Precision, device_type: str) -> None:
        forward = module.forward
        self.precision = precision
        self.device_type = device_type
        functools.update_wrapper(self, forward)
        # update_wrapper would create a cycle with the module.
        self.__wrapped__ = self.forward = weak_forward(forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in the precision's autocast context."""
        with autocast(self.device_type, self.precision.name, self.precision.autocast):
            return self.forward(*args, **kwargs)


def wrap_forward(model: torch.nn.Module, precision: Precision, device_type: str) -> None:
    """Make `model` compute in `precision`, with fp32 outputs unless its options say otherwise; idempotent.

    A model that another Accelerator prepared with another precision changes to this one, with a warning.
    """
    previous = _precision_of(model)
    if previous == precision or (previous is None and hasattr(model, "_original_forward")):
        return  # wrapped already, or the forward was replaced afterwards
    if previous is not None:
        warn(
            f"{type(model).__name__} was prepared by another Accelerator with "
            f"mixed_precision={previous.name!r}, and computes with {precision.name!r} from now on. Give each "
            "Accelerator its own model (copy.deepcopy) to have both.",
            UserWarning,
        )
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
    if not precision.is_mixed:
        return
    forward = AutocastForward(model, precision, device_type)
    # The name under which clients, and extract_model_from_parallel, find the forward to restore.
    model._original_forward = forward.forward  # type: ignore[assignment]
    model.forward = convert_outputs_to_fp32(forward) if precision.converts_outputs else forward


def _precision_of(model: torch.nn.Module) -> Precision | None:
    """The precision that `wrap_forward` gave to a model, else None."""
    forward = vars(model).get("forward")
    wrapper = getattr(forward, "model_forward", forward)  # inside of convert_outputs_to_fp32
    return wrapper.precision if isinstance(wrapper, AutocastForward) else None
