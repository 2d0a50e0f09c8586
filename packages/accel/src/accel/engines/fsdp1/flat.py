"""Wrapping models in torch's FullyShardedDataParallel (FSDP version 1), and reading flat parameters.

The only module that reads torch's private state of version 1 (torch 2.10 to 2.13). Each wrapped module has a
flat parameter: one vector of all its parameters, of which each process of a group keeps a shard.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState, clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _reduce_grad, _reduce_grad_no_shard, _reshard

from accel.engines.common.norms import ShardSets
from accel.engines.fsdp_groups import Groups, aliases
from accel.engines.initial_weights import WeightSource, materialize_group, materialize_rest
from accel_ops.trees.walk import flatten


@dataclass(frozen=True)
class FlatSharding:
    """How a model is sharded.

    Attributes:
        source: The mesh (one axis of shards, or replicas x shards), the device, and whose weights count.
        options: Options of FullyShardedDataParallel that all wrapped modules share.
    """

    source: WeightSource
    options: dict[str, Any] = field(default_factory=dict)


def shard_flat(model: torch.nn.Module, groups: Groups, how: FlatSharding) -> FullyShardedDataParallel:
    """Wrap the groups, inner ones first, and then the model.

    Each group is moved to the device and filled just before it is sharded: no process ever needs memory for
    more than its copy of the model and one group.

    Returns:
        The wrapper that trains.
    """
    # Ignored parameters are not sharded, so they have to start equal on all processes.
    keep = materialize_rest(model, groups.ignored, how.source)
    # A module that is used in several places is wrapped once, and its wrapper used in all of them.
    places: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for module in groups.modules:
        wrapped = _wrap(model, module, keep, how)
        for parent, name in places[module]:
            setattr(parent, name, wrapped)
    root = _wrap(model, model, keep, how)
    root.register_forward_hook(_reshard_after_evaluation)
    if root.sharding_strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        root.register_forward_hook(_reshard_frozen)
    return root


def _reshard_after_evaluation(root: FullyShardedDataParallel, inputs: Any, output: Any) -> None:
    """Reshard after a forward pass without gradients: in-place changes would not reach the shards."""
    if not torch.is_grad_enabled():
        reshard([root])


def _reshard_frozen(root: FullyShardedDataParallel, inputs: Any, output: Any) -> None:
    """Reshard the root's parameters after forward if all are frozen: torch leaves them to backward.

    Changes to them (by torch.optim.swa_utils.AveragedModel, say) would otherwise not reach the shards.
    """
    handle = root._handle
    if handle is not None and not handle.flat_param.requires_grad and not handle.needs_unshard():
        _reshard(root, handle, free_unsharded_flat_param=True)


def _wrap(
    model: torch.nn.Module, module: torch.nn.Module, keep: set[torch.nn.Parameter], how: FlatSharding
) -> FullyShardedDataParallel:
    inner = FullyShardedDataParallel.fsdp_modules(module)
    done = keep.union(*(unit.parameters() for unit in inner))
    materialize_group(model, module, done, aliases(model), how.source)  # wrapping changes the names
    with warnings.catch_warnings():
        # One process has one shard, which torch calls NO_SHARD and advises against.
        is_single = how.source.mesh.size() == 1
        for message in (".*since the world size is 1", ".*NO_SHARD.* is deprecated") if is_single else ():
            warnings.filterwarnings("ignore", message)
        wrapped = FullyShardedDataParallel(
            module,
            device_mesh=how.source.mesh,
            device_id=how.source.device,
            ignored_states=list(keep) or None,
            **how.options,
        )
    if wrapped._handle is not None and how.source.mesh.size() > 1:
        # Inside torch's wrapper, whose hooks on the output gather what this one's backward needs.
        wrapped.module.register_forward_hook(partial(_reduce_unused_as_zeros, wrapped._handle.flat_param))
    return wrapped


def _reduce_unused_as_zeros(flat: torch.Tensor, module: Any, inputs: Any, output: Any) -> Any:
    """Reduce zeros for a flat parameter that the output does not depend on here: other ranks may use it."""
    if not (flat.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    tensors, rebuild = flatten(output)
    places = [place for place, item in enumerate(tensors) if item.grad_fn is not None]
    stop = {item.grad_fn for item in flatten(inputs)[0]}
    if not places or _depends([tensors[place].grad_fn for place in places], flat, stop):
        return None
    tensors[places[0]] = _WithZeros.apply(tensors[places[0]], flat)  # type: ignore[no-untyped-call]
    return rebuild(tensors)


def _depends(nodes: list[Any], leaf: torch.Tensor, stop: set[Any]) -> bool:
    """Whether autograd nodes lead to a leaf without passing through the nodes in `stop`."""
    seen = {*nodes}
    waiting = deque(node for node in nodes if node not in stop)
    while waiting:
        node = waiting.popleft()
        if getattr(node, "variable", None) is leaf:
            return True
        children = [item for item, _ in node.next_functions if item is not None and item not in seen]
        seen.update(children)
        waiting.extend(item for item in children if item not in stop)
    return False


class _WithZeros(torch.autograd.Function):
    """Returns a tensor unchanged, and gives a parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.like = parameter.shape, parameter.dtype, parameter.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


def fsdp_units(models: Iterable[torch.nn.Module]) -> Iterator[tuple[FullyShardedDataParallel, Any]]:
    """The wrapped modules with a flat parameter, each with torch's handle of it."""
    for model in models:
        for module in FullyShardedDataParallel.fsdp_modules(model):
            if module._handle is not None:
                yield module, module._handle


def units_by_name(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The wrapped modules, by their names in the original model."""
    return {
        clean_tensor_name(name): module
        for name, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }


def reshard(models: Iterable[torch.nn.Module]) -> None:
    """Replace unsharded parameters by their shards: otherwise they would miss the optimizer's step.

    A forward pass without a backward pass leaves them unsharded. Frozen ones may stay so.
    """
    for module, handle in fsdp_units(models):
        flat = handle.flat_param
        has_run = hasattr(flat, "_full_param_padded")  # made by the first forward pass
        if has_run and flat.requires_grad and handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(module, handle, free_unsharded_flat_param=True)


def reduce_gradients(models: Iterable[torch.nn.Module]) -> None:
    """Reduce unreduced gradients, as a backward pass outside of `no_sync` does."""
    for module, handle in fsdp_units(models):
        flat = handle.flat_param
        # Nothing to reduce, or reduced already.
        if flat.grad is None or not (is_unreduced(handle) or not handle.uses_sharded_strategy):
            continue
        # What torch's post-backward hook does, which `no_sync` skips.
        flat.grad.data = flat.grad.to(handle._reduce_dtype)
        # torch asserts these states in the calls below.
        states = module.training_state, handle._training_state
        module.training_state = TrainingState.FORWARD_BACKWARD
        handle._training_state = HandleTrainingState.BACKWARD_POST
        try:
            with _reducing(module):
                (_reduce_grad if handle.uses_sharded_strategy else _reduce_grad_no_shard)(module, handle)
        finally:
            module.training_state, handle._training_state = states
        # `prepare_gradient_for_optim` moves the reduced shard to `.grad` only after a backward pass.
        flat._post_backward_called = True
        handle.prepare_gradient_for_optim()
        flat._post_backward_called = False


@contextlib.contextmanager
def _reducing(module: Any) -> Iterator[None]:
    """The stream in which torch reduces shards; replicas are reduced in another one afterwards."""
    current, reducing = module._device_handle.current_stream(), module._post_backward_stream
    reducing.wait_stream(current)
    with module._device_handle.stream(reducing):
        yield
    current.wait_stream(reducing)
    if module._all_reduce_stream is not current:
        current.wait_stream(module._all_reduce_stream)


def drop_gradients(models: Iterable[torch.nn.Module], wanted: AbstractSet[int] | None = None) -> None:
    """Drop unreduced gradients, and reduced ones that torch saves for the end of the window.

    Args:
        models: The wrapped models.
        wanted: The `id` of each parameter whose gradient is dropped; None for all.
    """
    for _, handle in fsdp_units(models):
        flat = handle.flat_param
        # Where torch keeps the reduced gradient between backward and its final callback, or of a previous
        # micro-batch.
        saved = getattr(flat, "_saved_grad_shard", None)
        if not is_unreduced(handle) and saved is None:
            continue
        members = [item for item in flat._params or (flat,) if item.requires_grad]
        if wanted is None or wanted >= {id(item) for item in members}:
            flat.grad = None
            for item in members:
                item.grad = None
            if saved is not None:
                del flat._saved_grad_shard
            continue
        if flat._params is None:  # stepped as one tensor, by another optimizer
            continue
        views = handle._get_unflat_views(flat.grad) if is_unreduced(handle) else [None] * len(flat._params)
        for item, view, place in zip(flat._params, views, flat._shard_param_infos, strict=True):
            if id(item) in wanted:
                if view is not None:
                    view.zero_()
                if saved is not None and place.in_shard:
                    saved[place.offset_in_shard :][: place.numel_in_shard].zero_()


def is_unreduced(handle: Any) -> bool:
    """Whether the gradient is full, and the parameters are sharded."""
    flat = handle.flat_param
    return handle.uses_sharded_strategy and flat.grad is not None and flat.grad.shape != flat._sharded_size


def flattened_modules(models: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """The modules whose parameters are in flat ones."""
    return {info.module for _, handle in fsdp_units(models) for info in handle.flat_param._param_infos}


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a flat one, or a view of one; also after its wrapper is gone."""
    return bool(getattr(parameter, "_fsdp_flattened", False))  # set by torch


def group_by_parameter(models: Iterable[torch.nn.Module]) -> dict[int, dist.ProcessGroup | None]:
    """The group over which each parameter is sharded, by its `id`; None where it is not sharded.

    Includes each flat parameter and, with use_orig_params, the parameters in it, but no ignored parameters.
    """
    found: dict[int, dist.ProcessGroup | None] = {}
    for _, handle in fsdp_units(models):
        group = handle.process_group if handle.uses_sharded_strategy else None
        found |= {id(item): group for item in (handle.flat_param, *(handle.flat_param._params or ()))}
    return found


def owners_by_name(root: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """For every name of the original model, the parameter that optimizers step now."""
    found = {
        clean_tensor_name(name): parameter
        for name, parameter in root.named_parameters(remove_duplicate=False)
        if not name.endswith("_flat_param")
    }
    paths = {module: clean_tensor_name(name) for name, module in root.named_modules()}
    for module, handle in fsdp_units([root]):
        # Then the module has the flat parameter itself, and its members have no names.
        if not handle._use_orig_params:
            prefix = f"{paths[module]}." if paths[module] else ""
            shared = (
                f"{path}.{name}" if path else name
                for name, _, path, *_ in handle.flat_param._shared_param_infos
            )
            for name in chain(handle.flat_param._fqns, shared):
                found[f"{prefix}{clean_tensor_name(name)}"] = handle.flat_param
    return found


def gradients(models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The gradients of flat parameters, reduced and unreduced ones.

    The gradients of the parameters in a flat parameter are its own views.
    """
    found = []
    for _, handle in fsdp_units(models):
        flat = handle.flat_param
        found += [item for item in (flat.grad, getattr(flat, "_saved_grad_shard", None)) if item is not None]
    return found


def gradient_sets(parameters: Iterable[torch.Tensor], models: Iterable[torch.nn.Module]) -> ShardSets:
    """This process's shards of reduced gradients, each set with the groups over which they are sharded.

    All processes of a group have the same sets, even if all elements are on other processes.
    """
    # Found once: each lookup would walk all modules.
    groups = group_by_parameter(models)
    sets: dict[dist.ProcessGroup | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        found = sets.setdefault(groups.get(id(parameter)), [parameter.detach().new_empty(0)])
        # Inside a window the gradient is full, while the parameter is sharded again.
        if parameter.grad is not None and parameter.grad.shape == parameter.shape:
            found.append(parameter.grad)
    return [(found, [] if group is None else [group]) for group, found in sets.items()]


def local_state(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This process's tensors of a model: its shards of flat parameters, and unsharded tensors."""
    found: dict[str, torch.Tensor] = {}
    paths = {module: clean_tensor_name(name) for name, module in root.named_modules()}
    for module, handle in fsdp_units([root]):
        flat = handle.flat_param
        # This process's shard, also while the parameter is unsharded.
        found[f"{paths[module]}.flat_param".lstrip(".")] = getattr(flat, "_local_shard", flat.data)
    owned = group_by_parameter([root])
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if id(tensor) not in owned:
            found[clean_tensor_name(name)] = tensor.detach()
    return found


def load_local_state(root: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load what `local_state` returned, on a process with the same shards.

    Raises:
        ValueError: If the shards differ.
    """
    current = local_state(root)
    sizes = {name: tuple(tensor.shape) for name, tensor in current.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if sizes != saved:
        different = sorted(name for name in sizes.keys() | saved.keys() if sizes.get(name) != saved.get(name))
        raise ValueError(
            f"the saved shard of {different[0]} has the shape {saved.get(different[0])}, and the one "
            f"here has {sizes.get(different[0])}. Load it on as many processes, with the same wrapping and "
            "strategy."
        )
    for _, handle in fsdp_units([root]):
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            handle.reshard(free_unsharded_flat_param=True)  # an evaluation may have left it unsharded
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(state[name])


def upcast_groups(model: torch.nn.Module, groups: Groups) -> tuple[list[str], list[str]]:
    """Upcast parameters to float32 for mixed precision: trainable ones, and those in the same flat parameter,
    which has one dtype.

    Returns:
        The names of the trainable ones that changed, and of the frozen ones.
    """
    changed: tuple[list[str], list[str]] = [], []
    for members in members_of(model, groups):
        if any(item.requires_grad and item.dtype.itemsize < 4 for item in members):
            for parameter, name in members.items():
                if parameter.dtype.itemsize < 4 and parameter.dtype.is_floating_point:
                    parameter.data = parameter.data.float()
                    changed[0 if parameter.requires_grad else 1].append(name)
    return changed


def check_flat_groups(model: torch.nn.Module, groups: Groups, upcasts: bool, use_orig_params: bool) -> None:
    """Reject parameters that cannot be in one flat parameter.

    Args:
        model: The model.
        groups: Its wrapped modules and ignored parameters.
        upcasts: Whether `upcast_groups` comes first.
        use_orig_params: Whether the parameters stay visible.

    Raises:
        ValueError: If those of one group have several dtypes or a complex one, or some are frozen and may
            not be.
    """
    for members in members_of(model, groups):
        # As `upcast_groups` will do later; nothing is changed here.
        lifts = upcasts and any(item.requires_grad and item.dtype.itemsize < 4 for item in members)
        dtypes = {
            torch.float32 if lifts and item.dtype.itemsize < 4 else item.dtype: name
            for item, name in members.items()
        }
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} in {dtype}" for dtype, name in dtypes.items())
            raise ValueError(
                f"fsdp_version=1 flattens the parameters of a group of {type(model).__name__} into one "
                f"vector, and they have several dtypes: {listed}. Cast them to one, give them their own "
                "groups (auto_wrap_policy), or set fsdp_version=2, which requires it of trainable ones."
            )
        for item, name in members.items():
            if item.is_complex():
                raise ValueError(
                    f"{type(model).__name__}.{name} is complex, and fsdp_version=1 flattens only real "
                    "parameters. Set fsdp_version=2."
                )
        kinds = {item.requires_grad: name for item, name in members.items()}
        if len(kinds) > 1 and not use_orig_params:
            raise ValueError(
                f"fsdp_version=1 flattens the parameters of a group of {type(model).__name__} into one "
                f"vector, and {kinds[True]} is trained while {kinds[False]} is frozen. Set "
                "use_orig_params=True, or fsdp_version=2."
            )


def members_of(model: torch.nn.Module, groups: Groups) -> list[dict[torch.nn.Parameter, str]]:
    """The parameters of each group, with their names; without ignored ones."""
    # A parameter belongs to the innermost group; the rest belongs to the root.
    group_of: dict[torch.nn.Parameter, torch.nn.Module] = {}
    for module in groups.modules:  # inner ones first
        for parameter in module.parameters():
            group_of.setdefault(parameter, module)
    found: dict[torch.nn.Module, dict[torch.nn.Parameter, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter not in groups.ignored:
            found.setdefault(group_of.get(parameter, model), {})[parameter] = name
    return list(found.values())
