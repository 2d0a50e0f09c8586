"""Full tensors that `fully_shard` keeps: unreduced gradients and unsharded parameters.

torch (2.10 to 2.15) does not document the objects in which it keeps them, FSDPParamGroup and FSDPParam;
`accel.engines.torch_private` leads to them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel.engines.torch_private import (
    end_backward,
    gradient_hooks,
    is_gathered,
    is_in_backward,
    parameter_groups,
    set_gradient_hooks,
    unsharded_parameter,
)


@contextlib.contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """Keep full gradients unreduced, until the first backward pass outside of the context."""
    # torch's documented switch, for the module and all modules inside it.
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def reduce_gradients(model: FSDPModule) -> None:
    """Reduce unreduced gradients, as a backward pass outside of `no_sync` does at its end."""
    modules = cast("torch.nn.Module", model).modules()
    units = [unit for unit in modules if isinstance(unit, FSDPModule)]
    if any(True for _ in unreduced_gradients(units)):
        end_backward(model)


def reduce_unused_as_zeros(unit: FSDPModule, unused: list[Any]) -> None:
    """Reduce zeros for parameters that a backward pass does not use here: other ranks may use them.

    torch reduces the parameters that have gradients, which may be different ones on each process. Its
    `set_reduce_scatter_unused_params` (2.13) leaves zeros where no process used a parameter.

    Args:
        unit: A module that shards parameters.
        unused: The list to add them to, for `drop_unused`.
    """
    for group in parameter_groups(unit):
        group.post_backward = partial(_post_backward, weakref.ref(group), unused)


def _post_backward(reference: weakref.ref[Any], unused: list[Any], *_: Any) -> None:
    group: Any = reference()
    has_gradient = [_unreduced(parameter) is not None for parameter in group.fsdp_params]
    # Other processes may use parameters of a module of which only the output has a gradient here.
    is_reached = is_in_backward(group) or any(has_gradient)
    if group.reduce_grads and is_reached:
        for parameter, has in zip(group.fsdp_params, has_gradient, strict=True):
            if not has and parameter.sharded_param.requires_grad:
                # Negative zeros: the sum is -0.0 only if no process adds another number.
                full = unsharded_parameter(parameter)
                full.grad = torch.full_like(full, -0.0)
                unused.append(parameter)
        if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
            for parameter in group.fsdp_params:  # torch reduces gradients of one dtype together
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
    # The class's method, as the instance's is this function.
    type(group).post_backward(group)


def move_hooks(unit: FSDPModule, hooks_of: Mapping[int, Any]) -> None:
    """Call the hooks of shards, also those registered later, with the gradient of the full parameter.

    Args:
        unit: A module that shards parameters.
        hooks_of: The hooks of the original parameters, by the `id` of the shard that replaced each.
    """
    for parameter in sharded_parameters(unit):
        if hooks := hooks_of.get(id(parameter.sharded_param)):
            set_gradient_hooks(parameter.sharded_param, hooks)  # the same dict: handles can still remove them
        parameter.init_unsharded_param = partial(_init_with_hooks, weakref.ref(parameter))


def _init_with_hooks(reference: weakref.ref[Any]) -> None:
    parameter: Any = reference()
    # The class's method, as the instance's is this function.
    type(parameter).init_unsharded_param(parameter)
    hooks, full = gradient_hooks(parameter.sharded_param), unsharded_parameter(parameter)
    if hooks is not None and gradient_hooks(full) is not hooks:
        set_gradient_hooks(full, hooks)


def drop_unused(unused: list[Any]) -> None:
    """Drop the gradients of parameters that no process has used, as on one process."""
    for parameter in unused:
        gradient = parameter.sharded_param.grad
        if gradient is not None and not _is_empty_somewhere(parameter):
            local = gradient.to_local()
            if bool(((local == 0) & torch.signbit(local)).all()):
                parameter.sharded_param.grad = None
    unused.clear()


def _is_empty_somewhere(parameter: Any) -> bool:
    """Whether some process has no elements, so that it cannot tell if there is a gradient: all keep zeros."""
    full, shards = unsharded_parameter(parameter), getattr(parameter.mesh_info, "shard_mesh_size", 1)
    local = full.to_local() if isinstance(full, DTensor) else full
    length = local.shape[parameter.fsdp_placement.dim]
    return bool(-(-length // shards) * (shards - 1) >= length)


def unreduced_gradients(units: Iterable[FSDPModule]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The unreduced full gradients, each with the state that `fully_shard` keeps of its parameter."""
    for unit in units:
        for parameter in sharded_parameters(unit):
            if (gradient := _unreduced(parameter)) is not None:
                yield parameter, gradient


def drop_gradients(units: Iterable[FSDPModule], wanted: Collection[int] | None = None) -> None:
    """Drop unreduced gradients.

    Args:
        units: The modules that shard parameters.
        wanted: The `id` of each shard whose gradient is dropped; None for all.
    """
    for parameter, _ in unreduced_gradients(units):
        if wanted is None or id(parameter.sharded_param) in wanted:
            # Both places: with a separate reduction dtype torch moves the gradient to the first, otherwise it
            # stays in the second. torch 2.15 always leaves it there.
            if "unsharded_accumulated_grad" in vars(parameter):
                parameter.unsharded_accumulated_grad = None
            if (full := unsharded_parameter(parameter)) is not None:
                full.grad = None


def patch_zero_grad(model: FSDPModule) -> None:
    """Make `model.zero_grad()` drop unreduced gradients too."""
    model.zero_grad = partial(_zero_grad, weakref.ref(model))  # type: ignore[attr-defined]


def _zero_grad(reference: weakref.ref[Any], set_to_none: bool = True) -> None:
    model: Any = reference()
    # The class's method, as the instance's is this function; weakly bound: the model can be freed.
    type(model).zero_grad(model, set_to_none)
    drop_gradients(unit for unit in model.modules() if isinstance(unit, FSDPModule))


def sharded_parameters(module: FSDPModule) -> Iterator[Any]:
    """The state that `fully_shard` keeps of each parameter in the groups of a module."""
    for group in parameter_groups(module):
        yield from group.fsdp_params


def unsharded_parameters(
    units: Iterable[FSDPModule],
) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Unsharded parameters, each with the shard that it replaces between forward and backward."""
    for unit in units:
        for parameter in sharded_parameters(unit):
            unsharded = unsharded_parameter(parameter)
            if unsharded is not None:
                yield unsharded, parameter.sharded_param


def reshard(units: Iterable[FSDPModule]) -> None:
    """Replace unsharded parameters by their shards: otherwise they would miss the optimizer's step.

    Frozen ones may stay unsharded.
    """
    for unit in units:
        _copy_requires_grad(unit)
        if any(parameter.sharded_param.requires_grad for parameter in sharded_parameters(unit)):
            unit.reshard()


def reshard_after_evaluation(unit: FSDPModule, keeps_frozen: bool) -> None:
    """Reshard a module after a forward pass without a backward pass: torch does not.

    Otherwise an evaluated module keeps unsharded parameters, and changes to these (by an optimizer, or by
    averaging weights) do not reach the shards.

    Args:
        unit: A module that stays unsharded after forward.
        keeps_frozen: Whether it stays so if all of it is frozen, to be gathered only once.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def free(module: Any, inputs: Any, output: Any) -> None:
        is_trained = any(parameter.sharded_param.requires_grad for parameter in sharded_parameters(module))
        if not torch.is_grad_enabled() if is_trained else not keeps_frozen:
            module.reshard()

    module = cast("torch.nn.Module", unit)
    module.register_forward_hook(free)
    module.register_forward_pre_hook(_before_forward, prepend=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(module: Any, inputs: Any) -> None:
    """A forward pass without backward leaves unsharded parameters, which a user may have frozen since."""
    _copy_requires_grad(module)


def _copy_requires_grad(unit: FSDPModule) -> None:
    """Copy `requires_grad` from unsharded parameters to their shards.

    torch sets both equal when it gathers them: if they differ, the user changed it.
    """
    changed = [
        parameter
        for group in parameter_groups(unit)
        if is_gathered(group)  # few are, in a step
        for parameter in group.fsdp_params
        if parameter.sharded_param.requires_grad is not unsharded_parameter(parameter).requires_grad
    ]
    if changed:
        flags = [unsharded_parameter(parameter).requires_grad for parameter in changed]
        unit.reshard()
        for parameter, flag in zip(changed, flags, strict=True):
            parameter.sharded_param.requires_grad_(flag)


def _unreduced(parameter: Any) -> torch.Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:  # in the dtype of the reduction
        return parameter.unsharded_accumulated_grad  # type: ignore[no-any-return]
    unsharded = unsharded_parameter(parameter)
    return None if unsharded is None else unsharded.grad
