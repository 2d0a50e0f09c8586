"""What engines use of torch that torch does not document, one function each, with the reason.

Each names the versions of torch that it was tested with; another one may lack it. What belongs to one wrapper
of torch is with the code for that wrapper: `fsdp2_gradients.py`, `fsdp1/flat.py`, `ddp.py` and
`common/gradient_waits.py`.

torch's modules are imported in the functions, as programs that do not need them should not load them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_ROTATIONS = {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}
_SEQUENCE = 2  # of (batch, heads, sequence, features)


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


def clear_sharding_caches() -> None:
    """Clear torch's caches of how operations on DTensors are sharded, and of how layouts are changed.

    torch 2.10 to 2.15. A new mesh is equal to one of the same shape whose process groups are gone, and the
    caches have those of the old one.
    """
    debug: Any = import_module("torch.distributed.tensor.debug")
    redistribute: Any = import_module("torch.distributed.tensor._redistribute")
    # Both, as torch before 2.13 has no function that does.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    # It has placements from the others, with the mask of a split embedding.
    redistribute._gen_transform_infos.cache_clear()


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
    # The same for the whole group. By name, as an import would cost more, in each step.
    return bool(group.fsdp_params[0].sharded_state.name == "UNSHARDED")


def is_in_backward(group: Any) -> bool:
    """Whether a backward pass has reached one of `parameter_groups`.

    torch 2.10 to 2.15. The output of its module has a gradient then; the parameters may have none.
    """
    return bool(group._training_state.name == "PRE_BACKWARD")


def unsharded_parameter(parameter: Any) -> Any:
    """The full parameter of one that `fully_shard` shards; None before the first forward pass.

    torch 2.10 to 2.15. The module has it only while it is gathered; its unreduced gradient is kept longer.

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


# Ring attention


def ring_attention(
    mesh: DeviceMesh,
    rotation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Attend to the balanced shards of all processes of an axis.

    torch 2.10 to 2.15. torch has functions for the fused kernels of accelerators; the kernel of the CPU goes
    through their template. The documented `context_parallel` replaces attention in a whole block of code, and
    has no kernel of the CPU.

    Args:
        mesh: The axis.
        rotation: How keys and values travel, "allgather" or "alltoall".
        query: This process's (batch, heads, tokens, features).
        key: The same of the keys.
        value: The same of the values.
        is_causal: Whether tokens attend to themselves and earlier ones alone.
        scale: Factor of the scores; by default 1 / sqrt(features).

    Returns:
        The output, the logarithms of the sums of exponentials, and what else the kernel keeps for backward.

    Raises:
        RuntimeError: If this version of torch has no ring where it is looked for.
    """
    call = {"query": query, "key": key, "value": value, "is_causal": is_causal, "scale": scale}
    with _ring(rotation, query.dtype, is_causal) as ring:
        # torch has no function for the CPU's kernel, as it has for those of CUDA:
        # the template is called itself.
        if query.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            out, sums, *rest = ring._templated_ring_attention(
                mesh.get_group(), _SEQUENCE, kernel, dropout_p=0.0, **call
            )
        # Flash attention takes fp16 and bf16 alone.
        elif query.dtype.itemsize == 2:
            out, sums, *rest = ring._scaled_dot_product_ring_flash_attention(mesh, **call)
        else:
            out, sums, *rest = ring._scaled_dot_product_ring_efficient_attention(mesh, **call)
    return out, sums, rest


def ring_attention_backward(
    mesh: DeviceMesh, rotation: str, gradient: torch.Tensor, rest: list[Any], call: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value.

    torch 2.10 to 2.15, for the reasons of `ring_attention`.

    Args:
        mesh: As for `ring_attention`.
        rotation: As for `ring_attention`.
        gradient: The gradient of the output.
        rest: What the kernel kept.
        call: By name the `query`, `key`, `value`, `is_causal` and `scale` of the forward pass, and its
            results `out` and `logsumexp`.
    """
    query, is_causal = call["query"], call["is_causal"]
    call = call | {"dropout_p": 0.0, "grad_out": gradient}
    with _ring(rotation, query.dtype, is_causal) as ring:
        if query.device.type == "cpu":
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            found = ring._templated_ring_attention_backward(
                mesh.get_group(), _SEQUENCE, kernel, grad_out_name="grad_out", **call
            )
        elif query.dtype.itemsize == 2:
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            call |= zip(names, rest, strict=False)  # the last of the rest is for debugging
            found = ring._scaled_dot_product_ring_flash_attention_backward(mesh, **call)
        else:
            call |= {"philox_seed": rest[0], "philox_offset": rest[1], "bias": None}
            call["grad_input_mask"] = (True, True, True, False)
            found = ring._scaled_dot_product_ring_efficient_attention_backward(mesh, **call)
    return tuple(found[:3])


@contextlib.contextmanager
def _ring(rotation: str, dtype: torch.dtype, is_causal: bool) -> Iterator[Any]:
    """Give torch's module, with the options of one call.

    Without a causal mask the order of tokens does not matter to attention, and torch's ring knows balanced
    shards of causal attention alone.
    """
    try:
        module: Any = import_module(_RING)
        options = module._cp_options
        wanted = {
            "rotate_method": module._RotateMethod[_ROTATIONS[rotation]],
            # Only a causal mask depends on the order of keys.
            "enable_load_balance": is_causal,
            # Partial results are added up in fp32, which would round float64.
            "convert_to_f32": dtype is not torch.float64,
        }
        before = {name: getattr(options, name) for name in wanted}
        # Looked up here, so that another version of torch is an error that says so.
        _ = module._templated_ring_attention, module._templated_ring_attention_backward
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(
            "Context parallelism calls the ring attention of torch 2.10 to 2.15, and torch "
            f"{torch.__version__} does not have it where it was ({error}). Install one of these versions, or "
            "set cp_size=1."
        ) from error
    try:
        vars(options).update(wanted)
        yield module
    finally:
        vars(options).update(before)
