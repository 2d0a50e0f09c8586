"""Dataclasses that customise autocast, the gradient scaler and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accel_optim import comm_hooks
from accel_state.enums import DDPCommunicationHookType
from accel_state.handlers import KwargsHandler

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_HOOK_OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
_WRAPPERS = ("no", "fp16", "bf16")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`, and whether prepared models return fp32.

    Args:
        enabled: Whether autocast is on; False makes a block in full precision.
        cache_enabled: Whether casts of weights are kept within a context; None for torch's default.
        convert_outputs_to_fp32: Whether the fp16 and bf16 outputs of a prepared model are converted to fp32.
            False keeps them in the precision that computed them: half the memory of large logits, and the
            loss must be computed in a precision that does (under `accelerator.autocast()`, torch's
            losses compute in fp32). Read when a model is prepared; an autocast block converts no outputs.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    convert_outputs_to_fp32: bool = True


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, for fp16 training.

    Args:
        init_scale: First scale.
        growth_factor: What the scale is multiplied by after `growth_interval` steps in a row with finite
            gradients.
        backoff_factor: What the scale is multiplied by after a step with inf or nan.
        growth_interval: Number of steps.
        enabled: Whether to scale at all.

    Raises:
        ValueError: If a value is outside its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        checks = (
            ("init_scale", self.init_scale > 0, "greater than 0"),
            ("growth_factor", self.growth_factor > 1, "greater than 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        )
        for name, is_valid, allowed in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)!r}.")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    Args:
        dim: As in DistributedDataParallel.
        broadcast_buffers: Whether buffers are taken from rank 0 at each forward.
        bucket_cap_mb: Size of a gradient bucket, in MiB.
        find_unused_parameters: Whether to look for parameters that got no gradient.
        check_reduction: As in DistributedDataParallel.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves one copy of them.
        static_graph: Whether the graph is the same in every iteration.
        comm_hook: How gradients are sent: "no" (unchanged), "fp16", "bf16", "power_sgd", "batched_power_sgd".
        comm_wrapper: "fp16" or "bf16" casts what the hook sends; without a hook, the plain all-reduce.
        comm_state_option: Options of `PowerSGDState` (matrix_approximation_rank, start_powerSGD_iter ...),
            for the two PowerSGD hooks.

    Raises:
        ValueError: If a hook or wrapper is unknown.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal["no", "fp16", "bf16"] = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Also by its name in any letter case.
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        wrapper = str(getattr(self.comm_wrapper, "value", self.comm_wrapper))
        if wrapper not in _WRAPPERS:
            raise ValueError(f"comm_wrapper must be one of {', '.join(_WRAPPERS)}, not {wrapper!r}.")

    def to_dict(self, ignore_keys: Iterable[str] = _HOOK_OPTIONS) -> dict[str, Any]:
        """Return the fields by name.

        Args:
            ignore_keys: Fields to leave out; by default those that DistributedDataParallel does not take.
        """
        # An iterator can be consumed only once.
        ignored = frozenset(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the communication hook, if one is chosen. Call it before the first backward.

        Args:
            model: The wrapped model.

        Raises:
            TypeError: If the model is not wrapped in DistributedDataParallel.
            ValueError: If `comm_state_option` has an option that PowerSGDState does not have.
        """
        wrapper = str(getattr(self.comm_wrapper, "value", self.comm_wrapper))
        # Fields of a dataclass may have been set since it was made, so the hook is looked up again.
        comm_hooks.register(model, DDPCommunicationHookType(self.comm_hook), wrapper, self.comm_state_option)
