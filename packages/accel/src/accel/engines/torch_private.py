"""What engines use of torch that torch does not document, one function each, with the reason.

Each names the versions of torch that it was tested with; another one may lack it. What belongs to one wrapper
of torch is with the code for that wrapper: `mesh/fsdp2_private.py`, `fsdp1/flat.py`, `ddp/engine.py` and
`common/gradient_waits.py`.

torch's modules are imported in the functions, as programs that do not need them should not load them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


# Modules


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside the wrapper of `torch.compile`; a module without that wrapper, unchanged.

    torch 2.10 to 2.15. The wrapper documents no way to its module.
    """
    module: torch.nn.Module = getattr(model, "_orig_mod", model)
    return module


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of FSDP1, activation checkpointing and `torch.compile`.

    torch 2.10 to 2.15. Each layer may have its own wrappers, so they are anywhere in the name; torch's state
    dicts drop only some of them.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def direct_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The dict in which a module keeps its direct parameters.

    torch 2.10 to 2.15. An attribute that is a parameter can be set only to another parameter, and not to a
    tensor that was computed from one.
    """
    return module._parameters


# Autograd


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running.

    torch 2.10 to 2.15. DDP and `fully_shard` do this; no documented hook runs there.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def gradient_hooks(tensor: torch.Tensor) -> Any:
    """The dict in which a tensor keeps the hooks of `register_hook`; None if it never had one.

    torch 2.10 to 2.15. No documented call lists them. Their handles remove them from this dict.
    """
    return tensor._backward_hooks


def set_gradient_hooks(tensor: torch.Tensor, hooks: Any) -> None:
    """Make a tensor keep the hooks of `register_hook` in this dict.

    torch 2.10 to 2.15. With the dict of another tensor, its handles remove hooks from both; hooks that were
    registered again would have handles of their own.
    """
    tensor._backward_hooks = hooks


def accumulation_hooks(tensor: torch.Tensor) -> Any:
    """The dict of the hooks of `register_post_accumulate_grad_hook`; None if there never was one.

    torch 2.10 to 2.15. No documented call lists them.
    """
    return getattr(tensor, "_post_accumulate_grad_hooks", None)


# DTensor


def layout_of(tensor: DTensor) -> Any:
    """The object that has a DTensor's mesh, placements and shape.

    torch 2.10 to 2.15. Its mesh can be replaced by an equal one; a DTensor's own attributes cannot be set.
    """
    return tensor._spec


def clear_sharding_cache() -> None:
    """Clear torch's cache of how operations on DTensors are sharded.

    torch 2.10 to 2.15. A new mesh is equal to one of the same shape whose process groups are gone, and the
    cache has those of the old one.
    """
    debug: Any = import_module("torch.distributed.tensor.debug")
    debug._clear_sharding_prop_cache()


# `fully_shard`


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The groups of a module's parameters that are gathered at once, torch's FSDPParamGroup.

    torch 2.10 to 2.15. They have the unreduced gradients and the unsharded parameters, to which no documented
    call leads.
    """
    state: Any = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one group at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def is_gathered(group: Any) -> bool:
    """Whether the parameters of one of `parameter_groups` are gathered now.

    torch 2.10 to 2.15. `unshard` and `reshard` are documented, but not which of them was called last.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    # The same for the whole group.
    return group.fsdp_params[0].sharded_state is ShardedState.UNSHARDED


def is_in_backward(group: Any) -> bool:
    """Whether a backward pass has reached one of `parameter_groups`.

    torch 2.10 to 2.15. The output of its module has a gradient then; the parameters may have none.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    return bool(group._training_state == TrainingState.PRE_BACKWARD)


def unsharded_parameter(parameter: Any) -> Any:
    """The full parameter of one that `fully_shard` shards; None before the first forward pass.

    torch 2.10 to 2.15. The module has it only while it is gathered, and its unreduced gradient is kept longer.

    Args:
        parameter: One of the `fsdp_params` of a group, torch's FSDPParam.
    """
    return getattr(parameter, "_unsharded_param", None)


def end_backward(model: FSDPModule) -> None:
    """Reduce all unreduced gradients, unit by unit, and wait for them.

    torch 2.10 to 2.15. `fully_shard` does it at the end of each backward pass, and documents no call for it.

    Args:
        model: The outermost module that `fully_shard` shards.
    """
    state: Any = model._get_fsdp_state()
    # torch 2.15 asserts that a backward pass has set it.
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()
