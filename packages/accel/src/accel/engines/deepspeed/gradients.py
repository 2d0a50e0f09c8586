"""The gradients of one DeepSpeed engine between backward and step: their norm, clipping and scaling.

Where they are depends on the stage: in `parameter.grad` at stage 0, otherwise in buffers of DeepSpeed's
optimizer. The attributes used below are not documented; the engine contract's tests compare every result
with plain torch.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.engines.common.same_order import ZERO3_FIX, check_same_order
from accel.engines.deepspeed.runtime import import_deepspeed
from accel.engines.torch_private import direct_parameters

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


def in_parameters(engine: Any) -> bool:
    """Whether the gradients are in `parameter.grad`, as they are at stage 0."""
    return not engine.zero_optimization() and not _accumulates_separately(engine)


def average_over_all_ranks(engine: Any) -> None:
    """Average gradients over all processes under sequence parallelism, and count each once in norms.

    DeepSpeed (0.19) does so only at stage 3 with `reduce_scatter`. Otherwise it divides by the number of
    groups, and gradients are too large by the size of a group.
    """
    for reducer in (engine, engine.optimizer):
        if hasattr(reducer, "sequence_parallel_size"):  # used only for that divisor
            reducer.sequence_parallel_size = 1
    if _accumulates_separately(engine):
        engine.optimizer.mpu = None  # else it treats them as model-parallel groups, and computes no norm


def norm(engine: Any) -> torch.Tensor:
    """The 2-norm of the reduced gradients over all processes, if they are not in `.grad`."""
    optimizer = engine.optimizer
    if _accumulates_separately(engine):
        separate: torch.Tensor = import_deepspeed("runtime.utils").get_global_norm_of_tensors(
            optimizer.get_grads_for_norm()[0], mpu=optimizer.mpu
        )
        return separate
    if engine.zero_optimization_stage() == 3:
        # Private (0.19), as are most attributes of the optimizers here.
        groups = optimizer._get_norm_groups()
        scaled_norm = import_deepspeed("runtime.utils").combine_grad_norm_groups(groups)
    else:
        scaled_norm = optimizer.scaled_global_norm()
    total: torch.Tensor = scaled_norm / loss_scale(engine)
    return total


def check_all_parameters(engine: Any, parameters: Iterable[torch.Tensor], name: str) -> None:
    """Check that the parameters to clip are all trained ones: DeepSpeed clips them by one norm.

    Args:
        engine: The engine.
        parameters: The parameters to clip.
        name: The name of the Accelerator's engine.

    Raises:
        ValueError: If one is missing.
    """
    clipped = {id(item) for item in parameters}
    trained = {key: id(item) for key, item in engine.module.named_parameters() if item.requires_grad}
    missing = [key for key in trained if trained[key] not in clipped]
    if missing:
        raise ValueError(
            f"clip_grad_norm_ got {len(trained) - len(missing)} of the {len(trained)} parameters that are "
            f"trained (not {missing[0]}): {name} clips all gradients by one norm. Pass model.parameters()."
        )


def set_clipping(engine: Any, max_norm: float) -> None:
    """Make the next step clip gradients to a norm, or to that of the configuration if it is smaller."""
    configured = engine.gradient_clipping()
    smaller = min(max_norm, configured) if configured > 0.0 else max_norm
    # DeepSpeed does not clip if it is 0.
    engine.optimizer.clip_grad = 0.0 if smaller == float("inf") else smaller


def begin_pass(engine: Any) -> None:
    """Make stage 3 add the gradients of a backward pass to those of the previous one.

    DeepSpeed (0.19) does so in forward, and otherwise counts two consecutive passes as one.
    """
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.clear_backward_seen_flag()


def reduce(engine: Any) -> None:
    """Reduce the gradients accumulated by the backward passes of a window."""
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():  # stages 2 and 3 have reduced them, pass by pass
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def loss_scale(engine: Any) -> Any:
    """The factor that the loss was multiplied by (fp16); 1 in other precisions."""
    return getattr(engine.optimizer, "loss_scale", 1.0)


def scale_now(engine: Any, factor: float | torch.Tensor) -> bool:
    """Multiply the gradients accumulated so far, if they are accessible; returns whether they are."""
    if not _accumulates_separately(engine):
        return False
    for gradients in engine.optimizer.fp32_groups_gradients_flat:
        gradients.mul_(factor)
    return True


@contextlib.contextmanager
def scaled(engine: Any, factor: float | torch.Tensor | None) -> Iterator[None]:
    """A context in which a step multiplies the gradients, and their norm, by a factor.

    The optimizers of stages 1 to 3 divide gradients by the loss scale, which can be overridden.
    """
    if factor is None:
        yield
        return
    optimizer = engine.optimizer
    before = optimizer.custom_loss_scaler, optimizer.external_loss_scale
    # DeepSpeed divides by the scale, so the reciprocal multiplies. A window without weights has the factor
    # 0, and the gradient 0.
    optimizer.override_loss_scale(loss_scale(engine) * torch.as_tensor(factor).reciprocal())
    try:
        yield
    finally:
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = before


def discard(engine: Any) -> None:
    """Drop gradients that no step has used."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.micro_step_id = -1  # offloaded gradients of a first micro-batch are copied, not added
    # Gradients that stages 1 and 2 collect for the step: `zero_grad` keeps them, and the next window would
    # add to them.
    for name in ("averaged_gradients", "all_grad_tensors"):
        gathered: dict[int, Any] = getattr(optimizer, name, {})
        for group in gathered:
            gathered[group] = None


def undo_trial_step(engine: Any) -> None:
    """Undo the step with zero gradients that stage 0 takes in half precision to create optimizer states.

    It counts as a step, and applies weight decay to the fp32 copies of the weights.
    """
    if engine.zero_optimization() or not hasattr(engine.optimizer, "initialize_optimizer_states"):
        return
    engine.basic_optimizer.state.clear()
    engine.optimizer.refresh_fp32_params()


def reduce_matching(engine: Any, process: ProcessInfo, name: str) -> None:
    """Make sure that gradients of the same parameter are reduced if processes use different parameters.

    DeepSpeed collects each process's gradients in buckets, and sums the buckets.

    Args:
        engine: The engine.
        process: This process.
        name: The name of the Accelerator's engine.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if process.world_size == 1 or not stage or _accumulates_separately(engine):
        return
    if stage == 3:
        check_same_order(engine.module, gathered_modules(engine.module), process, name, ZERO3_FIX)
    elif stage == 1 and not optimizer.overlap_comm:  # reduced at the window's end, in the order of parameters
        optimizer.reduce_gradients = partial(_reduce_all, weakref.ref(optimizer))
    else:
        names = {id(item): key for key, item in engine.module.named_parameters()}
        optimizer.reduce_ipg_grads = partial(_reduce_checked, weakref.ref(optimizer), process, name, names)


def gathered_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules whose parameters stage 3 gathers at once."""
    leaves = [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]
    return {
        name: module
        for name, module in model.named_modules()
        if name in leaves
        or (direct_parameters(module) and not any(name.startswith(f"{leaf}.") for leaf in leaves))
    }


def _reduce_all(reference: weakref.ref[Any], *args: Any, **kwargs: Any) -> None:
    optimizer: Any = reference()
    for parameter in (item for group in optimizer.bit16_groups for item in group):
        if parameter.requires_grad and optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
            if optimizer.use_grad_accum_attribute:
                optimizer._fill_param_grad_accum_attribute(parameter)
    # The class's method: the instance's is this function. Bound weakly, so that the engine can be freed.
    type(optimizer).reduce_gradients(optimizer, *args, **kwargs)


def _reduce_checked(
    reference: weakref.ref[Any],
    process: ProcessInfo,
    name: str,
    names: dict[int, str],
    comm_dtype: Any = None,
) -> None:
    """Reduce the buckets, after a check that all processes have the same parameters in them.

    Raises:
        RuntimeError: On all processes, if they differ.
    """
    optimizer: Any = reference()
    places = [item[:2] for bucket in optimizer.ipg_buckets.values() for item in bucket.params]
    number = zlib.crc32(repr((comm_dtype, places)).encode())
    extremes = torch.tensor([number, -number], device=process.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        local_names = {names[id(optimizer.bit16_groups[group][place])] for group, place in places}
        every: list[Any] = [None] * process.world_size
        dist.all_gather_object(every, local_names)
        differing = sorted(set.union(*every) - set.intersection(*every)) or sorted(local_names)
        ranks = [rank for rank, found in enumerate(every) if differing[0] in found]
        raise RuntimeError(
            f"{name}: {differing[0]} has a gradient on processes {ranks} of {process.world_size}, or comes "
            "at another position in backward: DeepSpeed would add it to that of another parameter. Use all "
            "parameters on all processes (add 0.0 * parameter.sum() to the loss); or set zero_stage=1 "
            "without overlap_comm, where missing gradients count as zeros."
        )
    type(optimizer).reduce_ipg_grads(optimizer, comm_dtype=comm_dtype)


def _accumulates_separately(engine: Any) -> bool:
    """Whether gradients are in a buffer with a different dtype than parameters (stage 1, bf16 and fp32)."""
    return hasattr(engine.optimizer, "fp32_groups_gradients_flat")
