"""Filling a model with weights on this process's device, from the first process, one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accel.engines.common.layouts import local
from accel.engines.fsdp_groups import aliases

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


ParamInitFn = Callable[[torch.nn.Module], None]
Names = Mapping[torch.nn.Parameter, Sequence[str]]
"""What `aliases` returned for a model before parameters were replaced: one walk for all groups."""


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from and go to.

    Attributes:
        mesh: The processes that share the model: one axis of shards, or replicas x shards.
        device: The device of computation.
        sync: Whether all get the weights of the first process; else each process shards its own weights.
        param_init_fn: Gives memory, and perhaps values, to a module's parameters on the meta device; called
            for each module. None: memory only.
        tensor: The processes that split weights; they always get the weights of their first process.
    """

    mesh: DeviceMesh
    device: torch.device
    sync: bool = True
    param_init_fn: ParamInitFn | None = None
    tensor: DeviceMesh | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which weights are broadcast from the first process, in order."""
        axes = [(self.mesh, axis) for axis in range(self.mesh.ndim) if self.sync]
        axes += [(self.tensor, 0)] if self.tensor is not None else []
        return [mesh.get_group(axis) for mesh, axis in axes if mesh.size(axis) > 1]


def materialize_rest(
    model: torch.nn.Module, ignored: set[torch.nn.Parameter], how: WeightSource
) -> set[torch.nn.Parameter]:
    """Fill buffers and ignored parameters; returns the latter, new objects where they were on meta."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, _filled(buffer, how))  # a buffer stays persistent, or not, as it was
    keep = set()
    for parameter, names in aliases(model).items():
        if parameter in ignored:
            keep.add(_initialize_parameter(model, parameter, names, how))
    return keep


def materialize_group(
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
        done: Parameters to leave alone.
        names: The names of all parameters; those of a tied weight get the same new parameter.
        how: Where weights come from and go to.

    Raises:
        ValueError: If `param_init_fn` gave no memory to a parameter, and no other process has its values.
    """
    if how.param_init_fn is not None:
        _initialise(group, done, ensure_weights_retied(how.param_init_fn, model, how.device))
        names = aliases(model)  # it may have replaced parameters
    for parameter in list(group.parameters()):
        if parameter in done:
            continue
        if parameter.is_meta and not how.sync:
            raise ValueError(
                f"param_init_fn left {names[parameter][0]} on the meta device, and with "
                "sync_module_states=False it gets no values. Initialise it there."
            )
        # Names only for those on meta: a module that was filled before has new parameters.
        _initialize_parameter(model, parameter, names[parameter] if parameter.is_meta else (), how)


def ensure_weights_retied(
    param_init_fn: ParamInitFn, model: torch.nn.Module, device: torch.device
) -> ParamInitFn:
    """Make an initialiser of modules on the meta device keep tied weights tied.

    Args:
        param_init_fn: Gives memory to the parameters of one module.
        model: The model, with its weights tied.
        device: Where the weights are put.

    Returns:
        The initialiser: the first of the modules that share a parameter initialises it, and the others get
        the same parameter.
    """
    shared = [names for names in aliases(model).values() if len(names) > 1]
    paths = {module: name for name, module in model.named_modules()}

    def initialise(module: torch.nn.Module) -> None:
        param_init_fn(module)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        prefix = f"{paths[module]}." if paths[module] else ""
        local_names = {
            f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        for names in shared:
            for name in local_names & set(names):
                tied = map(model.get_parameter, names)
                initialised = next((item for item in tied if not item.is_meta), None)
                if initialised is not None:
                    put_parameter(model, name, initialised)

    return initialise


def _initialise(group: torch.nn.Module, done: set[torch.nn.Parameter], initialise: ParamInitFn) -> None:
    for module in list(group.modules()):
        parameters = module.parameters(recurse=False)
        if any(parameter.is_meta and parameter not in done for parameter in parameters):
            initialise(module)


def put_parameter(model: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Replace the parameter with this name in a model."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, parameter)


def _initialize_parameter(
    model: torch.nn.Module, parameter: torch.nn.Parameter, names: Sequence[str], how: WeightSource
) -> torch.nn.Parameter:
    if not parameter.is_meta:
        # In place: optimizers and tied modules keep the parameter object.
        parameter.data = _filled(parameter.data, how)
        return parameter
    fresh = torch.nn.Parameter(_filled(parameter.detach(), how), requires_grad=parameter.requires_grad)
    for name in names:
        put_parameter(model, name, fresh)
    return fresh


@torch.no_grad()
def _filled(value: torch.Tensor, how: WeightSource) -> torch.Tensor:
    """The tensor on the device, with the first process's values."""
    if value.is_meta:
        # Nothing to copy from the meta device; the broadcast below fills the memory.
        value = torch.empty_like(value, device=how.device)
    value = value.to(how.device)
    groups = how.groups
    if groups and value.numel():
        shard = local(value)
        # Collectives need contiguous memory; transposed weights are copied back.
        sent = shard.contiguous()
        for group in groups:
            # Replicas first, then shards, then the tensor-parallel group: each broadcasts what the previous
            # one has received.
            dist.broadcast(sent, group=group, group_src=0)
        if sent is not shard:
            shard.copy_(sent)
    return value
