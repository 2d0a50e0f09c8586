"""Communication hooks: how DistributedDataParallel sends gradients, with torch's hooks.

Added to torch's: bf16 hooks on backends for which torch rejects them, checked options of PowerSGD, a fix of
its batched form, and PowerSGD that recovers after an overflow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_state.enums import DDPCommunicationHookType
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

Hook = Callable[[Any, Any], Any]

_POWER_SGD = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


def register(
    model: DistributedDataParallel,
    hook_type: DDPCommunicationHookType,
    wrapper: str,
    options: dict[str, Any],
) -> None:
    """Register a hook on a wrapped model, if one is chosen. Call it before the first backward.

    Args:
        model: The wrapped model.
        hook_type: Which hook; NO for the plain all-reduce.
        wrapper: "fp16" or "bf16" casts what the hook sends; "no" does not.
        options: Options of `PowerSGDState`, for the two PowerSGD hooks.

    Raises:
        TypeError: If the model is not wrapped in DistributedDataParallel.
        ValueError: If an option is not one of PowerSGDState.
    """
    # The other hooks have no state, and so no options.
    compresses = hook_type in _POWER_SGD
    if options and not compresses:
        warn(
            f"comm_state_option={options} is ignored: it belongs to the hooks power_sgd and "
            f"batched_power_sgd, and comm_hook is {hook_type.value!r}.",
        )
    if hook_type == DDPCommunicationHookType.NO and wrapper == "no":
        return
    if not hasattr(model, "register_comm_hook"):
        raise TypeError(
            f"A communication hook needs a model in DistributedDataParallel, got {type(model).__name__}. "
            "Prepare the model in a run with several processes first."
        )
    # The model's group, which need not be the default one.
    group = model.process_group
    hook = _hook(hook_type)
    if compresses:
        hook = _with_overflow_reset(hook)
    state = _power_sgd_state(group, options) if compresses else group
    model.register_comm_hook(state, _accepted_by(group, _wrapped(hook, wrapper)))


def _hook(hook_type: DDPCommunicationHookType) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # Here, not at import, which must not change torch for programs without such a hook.
    if hook_type == DDPCommunicationHookType.BATCHED_POWER_SGD:
        _fix_orthogonalize()
    hooks: dict[DDPCommunicationHookType, Hook] = {
        DDPCommunicationHookType.NO: default_hooks.allreduce_hook,
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    return hooks[hook_type]


def _with_overflow_reset(hook: Hook) -> Hook:
    """Make PowerSGD start again after an overflow, whose nan it would add to the gradients forever."""
    # torch checks annotations of hooks, and a lambda has none
    return lambda state, bucket: hook(state, bucket).then(
        partial(_reset_after_overflow, state, bucket.index())
    )


def _reset_after_overflow(state: Any, bucket: int, sent: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """Drop the state of a bucket whose result is not finite; the result is the same on all processes."""
    gradients = sent.value()
    memories = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    # No additional synchronization: torch's hook has just waited for the device.
    # Before start_powerSGD_iter steps there is nothing to reset.
    if any(bucket in memory for memory in memories) and not gradients.isfinite().all():
        for memory in memories:
            memory.pop(bucket, None)
    return gradients


def _wrapped(hook: Hook, wrapper: str) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if wrapper == "no":
        return hook
    wrap = default_hooks.fp16_compress_wrapper if wrapper == "fp16" else default_hooks.bf16_compress_wrapper
    return wrap(hook)


def _accepted_by(group: torch.distributed.ProcessGroup, hook: Hook) -> Hook:
    """Hide the name of torch's bf16 hooks on backends that torch does not expect to reduce bf16 (gloo, MPI).

    DistributedDataParallel rejects them by name wherever there is no NCCL or XCCL.
    """
    import torch.distributed as dist

    if dist.get_backend(group) in ("nccl", "xccl") or not hook.__name__.startswith("bf16"):
        return hook
    return lambda state, bucket: hook(state, bucket)


def _power_sgd_state(group: torch.distributed.ProcessGroup, options: dict[str, Any]) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    # From the signature, as torch adds options from version to version.
    allowed = [name for name in inspect.signature(PowerSGDState).parameters if name != "process_group"]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"comm_state_option has unknown options {unknown}; allowed: {', '.join(allowed)}.")
    return PowerSGDState(process_group=group, **options)


def _fix_orthogonalize() -> None:
    """Fix torch's batched PowerSGD hook, which passes a matrix to a function that takes batches of matrices.

    Needed up to torch 2.13 at least; delete when `batched_powerSGD_hook` runs past `start_powerSGD_iter`
    without it.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    original = powerSGD_hook._orthogonalize
    if getattr(original, "takes_matrices", False):
        return

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        # A view: the matrix is changed in place.
        batch = matrices.unsqueeze(0) if matrices.dim() == 2 else matrices
        original(batch, epsilon)  # type: ignore[no-untyped-call]

    orthogonalize.takes_matrices = True  # type: ignore[attr-defined]
    powerSGD_hook._orthogonalize = orthogonalize
