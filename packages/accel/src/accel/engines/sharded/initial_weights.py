"""Giving a model its weights on this process's device, from the first process, one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from accel.engines.sharded.groups import aliases

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ParamInitFn = Callable[[torch.nn.Module], None]
Names = Mapping[torch.nn.Parameter, Sequence[str]]
"""What `aliases` returned for a model before parameters were replaced: one walk serves all groups."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from and go to.

    Attributes:
        mesh: The processes that share the model: one axis of shards, or replicas x shards.
        device: Where parameters are computed with.
        sync: Whether the weights of the first process count; else each shard is of its own process's weights.
        param_init_fn: Gives memory, and perhaps values, to a module's parameters on the meta device; called
            for each module. None: memory alone.
        tensor: The processes that split weights, of which the first one's count in any case.
    """

    mesh: DeviceMesh
    device: torch.device
    sync: bool = True
    param_init_fn: ParamInitFn | None = None
    tensor: DeviceMesh | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups whose first process's weights count, in the order in which they are passed on."""
        axes = [(self.mesh, axis) for axis in range(self.mesh.ndim) if self.sync]
        axes += [(self.tensor, 0)] if self.tensor is not None else []
        return [mesh.get_group(axis) for mesh, axis in axes if mesh.size(axis) > 1]


def fill_rest(
    model: torch.nn.Module, ignored: set[torch.nn.Parameter], how: WeightSource
) -> set[torch.nn.Parameter]:
    """Fill buffers and ignored parameters; returns the latter, new objects where they were on meta."""
    for module in model.modules():
        # By `_buffers`: setting one as an attribute would lose that it is not persistent.
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _filled(buffer, how)
    keep = set()
    for parameter, names in aliases(model).items():
        if parameter in ignored:
            keep.add(_fill_parameter(model, parameter, names, how))
    return keep


def fill_group(
    model: torch.nn.Module,
    group: torch.nn.Module,
    done: set[torch.nn.Parameter],
    names: Names,
    how: WeightSource,
) -> None:
    """Fill the parameters of a group, in place where they have memory.

    Args:
        model: The model.
        group: The model, or a module of it.
        done: Parameters that are left alone.
        names: The names of all parameters, by which those that share a weight get the same new one.
        how: Where weights come from and go to.

    Raises:
        ValueError: If `param_init_fn` gave no memory to a parameter, and no other process has its values.
    """
    if how.param_init_fn is not None:
        _initialise(group, done, ensure_weights_retied(how.param_init_fn, model, how.device))
        names = aliases(model)  # it may have put others in their places
    for parameter in list(group.parameters()):
        if parameter in done:
            continue
        if parameter.is_meta and not how.sync:
            raise ValueError(
                f"param_init_fn left {names[parameter][0]} on the meta device, and with "
                "sync_module_states=False nobody gives it values. Initialise it there."
            )
        # Names are for those on meta alone: a module that was filled by itself has others since.
        _fill_parameter(model, parameter, names[parameter] if parameter.is_meta else (), how)


def ensure_weights_retied(
    param_init_fn: ParamInitFn, model: torch.nn.Module, device: torch.device
) -> ParamInitFn:
    """Make an initialiser of modules on the meta device keep tied weights tied.

    Args:
        param_init_fn: Gives memory to the parameters of one module.
        model: The model, with its weights tied.
        device: Where the weights are put.

    Returns:
        The initialiser: the first of the modules that share a parameter gives it memory, and the others get
        that parameter.
    """
    shared = [names for names in aliases(model).values() if len(names) > 1]
    paths = {module: name for name, module in model.named_modules()}

    def initialise(module: torch.nn.Module) -> None:
        param_init_fn(module)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        prefix = f"{paths[module]}." if paths[module] else ""
        own = {
            f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        for names in shared:
            for name in own & set(names):
                tied = map(model.get_parameter, names)
                given = next((item for item in tied if not item.is_meta), None)
                if given is not None:
                    put_parameter(model, name, given)

    return initialise


def _initialise(group: torch.nn.Module, done: set[torch.nn.Parameter], initialise: ParamInitFn) -> None:
    for module in list(group.modules()):
        own = module.parameters(recurse=False)
        if any(parameter.is_meta and parameter not in done for parameter in own):
            initialise(module)


def put_parameter(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Put a parameter into a model in place of the one of this name."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, parameter)


def _fill_parameter(
    model: torch.nn.Module, parameter: torch.nn.Parameter, names: Sequence[str], how: WeightSource
) -> torch.nn.Parameter:
    if not parameter.is_meta:
        # In place, so that optimizers and ties keep the parameter.
        parameter.data = _filled(parameter.data, how)
        return parameter
    fresh = torch.nn.Parameter(_filled(parameter.detach(), how), requires_grad=parameter.requires_grad)
    for name in names:
        put_parameter(model, name, fresh)
    return fresh


@torch.no_grad()
def _filled(value: torch.Tensor, how: WeightSource) -> torch.Tensor:
    """The tensor on the device, as the first process has it."""
    if value.is_meta:
        # There is nothing to copy from the meta device; the broadcast below fills the memory.
        value = torch.empty_like(value, device=how.device)
    value = value.to(how.device)
    groups = how.groups
    if groups and value.numel():
        own = local(value)
        # Collectives take contiguous memory; the copy goes back for transposed weights.
        whole = own.contiguous()
        for group in groups:
            # Replicas first, then shards, then the tensor-parallel group: each passes on what the one before
            # has brought.
            dist.broadcast(whole, group=group, group_src=0)
        if whole is not own:
            own.copy_(whole)
    return value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; all of it, unless it is sharded."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    inner: torch.Tensor = getattr(part, "_tensor", part)  # of torchao's weights that are gathered in fp8
    return inner
