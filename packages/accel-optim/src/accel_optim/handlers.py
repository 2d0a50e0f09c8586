"""Value objects that customise autocast, the gradient scaler and DistributedDataParallel."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accel_state.enums import DDPCommunicationHookType
from accel_state.handlers import KwargsHandler

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["AutocastKwargs", "DistributedDataParallelKwargs", "GradScalerKwargs"]

Hook = Callable[[Any, Any], Any]

_HOOK_OPTIONS = ("comm_hook", "comm_wrapper", "comm_state_option")
_WRAPPERS = ("no", "fp16", "bf16")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`, and whether prepared models return fp32.

    Args:
        enabled: Whether autocast is on; False makes a block in full precision.
        cache_enabled: Whether casts of weights are kept within a context; None for torch's own default.
        convert_outputs_to_fp32: Whether the fp16 and bf16 outputs of a prepared model are converted to fp32.
            False keeps them in the precision that computed them: half the memory of large logits, and the
            loss has to be computed in a precision that does (under `accelerator.autocast()`, torch's own
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
        ValueError: If a value is outside of its range.
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
        for name, holds, allowed in checks:
            if not holds:
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
        comm_hook: How gradients travel: "no" (as they are), "fp16", "bf16", "power_sgd", "batched_power_sgd".
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
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        wrapper = str(getattr(self.comm_wrapper, "value", self.comm_wrapper))
        if wrapper not in _WRAPPERS:
            raise ValueError(f"comm_wrapper must be one of {', '.join(_WRAPPERS)}, not {wrapper!r}.")

    def to_dict(self, ignore_keys: Iterable[str] = _HOOK_OPTIONS) -> dict[str, Any]:
        """Return the fields by name.

        Args:
            ignore_keys: Fields to leave out; by default those that DistributedDataParallel does not take.
        """
        ignored = frozenset(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the communication hook, if one is chosen. Call it before the first backward.

        Args:
            model: The wrapped model.

        Raises:
            TypeError: If the model is not wrapped in DistributedDataParallel.
            ValueError: If `comm_state_option` has an option that PowerSGDState has not.
        """
        wrapper = str(getattr(self.comm_wrapper, "value", self.comm_wrapper))
        hook_type = DDPCommunicationHookType(self.comm_hook)
        compresses = hook_type in _POWER_SGD
        if self.comm_state_option and not compresses:
            warnings.warn(
                f"comm_state_option={self.comm_state_option} is ignored: it belongs to the hooks power_sgd "
                f"and batched_power_sgd, and comm_hook is {hook_type.value!r}.",
                stacklevel=2,
            )
        if hook_type == DDPCommunicationHookType.NO and wrapper == "no":
            return
        if not hasattr(model, "register_comm_hook"):
            raise TypeError(
                "A communication hook needs a model in DistributedDataParallel, got "
                f"{type(model).__name__}. Prepare the model in a run with several processes first."
            )
        group = model.process_group
        state = _power_sgd_state(group, self.comm_state_option) if compresses else group
        model.register_comm_hook(state, _accepted_by(group, _wrapped(_hook(hook_type), wrapper)))


_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


def _hook(hook_type: DDPCommunicationHookType) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook_type == DDPCommunicationHookType.BATCHED_POWER_SGD:
        _let_orthogonalize_take_matrices()
    hooks: dict[DDPCommunicationHookType, Hook] = {
        DDPCommunicationHookType.NO: default_hooks.allreduce_hook,
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    return hooks[hook_type]


def _wrapped(hook: Hook, wrapper: str) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if wrapper == "no":
        return hook
    wrap = default_hooks.fp16_compress_wrapper if wrapper == "fp16" else default_hooks.bf16_compress_wrapper
    return wrap(hook)


def _accepted_by(group: torch.distributed.ProcessGroup, hook: Hook) -> Hook:
    """Rename torch's bf16 hooks for backends that torch does not know to reduce bf16 (gloo and MPI do).

    DistributedDataParallel refuses them by name wherever there is no NCCL or XCCL.
    """
    import torch.distributed as dist

    if dist.get_backend(group) in ("nccl", "xccl") or not hook.__name__.startswith("bf16"):
        return hook
    return lambda state, bucket: hook(state, bucket)


def _power_sgd_state(group: torch.distributed.ProcessGroup, options: dict[str, Any]) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    allowed = [name for name in inspect.signature(PowerSGDState).parameters if name != "process_group"]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"comm_state_option has unknown options {unknown}; allowed: {', '.join(allowed)}.")
    return PowerSGDState(process_group=group, **options)


def _let_orthogonalize_take_matrices() -> None:
    """Repair torch's batched PowerSGD hook, which gives a matrix to a function that takes batches of them.

    Needed up to torch 2.13 at least; delete when `batched_powerSGD_hook` runs past `start_powerSGD_iter`
    without it.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    original = powerSGD_hook._orthogonalize
    if getattr(original, "takes_matrices", False):
        return

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        batch = matrices.unsqueeze(0) if matrices.dim() == 2 else matrices
        original(batch, epsilon)  # type: ignore[no-untyped-call]

    orthogonalize.takes_matrices = True  # type: ignore[attr-defined]
    powerSGD_hook._orthogonalize = orthogonalize
