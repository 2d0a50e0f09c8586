"""Sharding a model with `fully_shard`, one group at a time, from the first process's weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accel.parallel.wrapping import aliases

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Sharding", "check_dtypes", "check_ignored", "check_weights", "local", "shard", "upcast"]


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        mesh: One axis of shards, or replicas x shards.
        device: Where parameters are computed with.
        reshard_after_forward: Whether gathered parameters are freed after forward.
        precision: Dtypes of parameters in computing, and of gradients in reduction.
        offload: Whether shards rest on the CPU.
        sync: Whether the weights of the first process count; else each shard is of its own process's weights.
    """

    mesh: DeviceMesh
    device: torch.device
    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False
    sync: bool = True


def check_dtypes(model: torch.nn.Module, groups: Sequence[torch.nn.Module], mixed: bool) -> None:
    """Refuse parameters that cannot be in one group, which torch would do in the first forward pass.

    Raises:
        ValueError: If the trainable parameters of a group have several dtypes.
    """
    owner = {parameter: module for module in groups[::-1] for parameter in module.parameters()}
    found: dict[torch.nn.Module, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not mixed:
            found.setdefault(owner.get(parameter, model), {}).setdefault(parameter.dtype, name)
    for module, dtypes in found.items():
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} in {dtype}" for dtype, name in dtypes.items())
            raise ValueError(
                f"FSDP shards the trainable parameters of one {type(module).__name__} together, and "
                f"they have several dtypes: {listed}. Cast them to one, or train with "
                "mixed_precision='bf16', which keeps trainable parameters in float32."
            )


def check_ignored(model: torch.nn.Module, ignored: set[torch.nn.Parameter], size: int) -> None:
    """Refuse trainable parameters that nobody would reduce.

    Raises:
        ValueError: If there are any, and several processes with data of their own.
    """
    named = [name for name, item in model.named_parameters() if item in ignored and item.requires_grad]
    if named and size > 1:
        raise ValueError(
            f"ignored_modules leaves {', '.join(named)} to each process, where nobody would average their "
            "gradients. Freeze them with requires_grad_(False), or do not ignore them."
        )


def check_weights(model: torch.nn.Module, is_source: bool, sync: bool) -> None:
    """Refuse a model without weights where they are needed.

    Raises:
        ValueError: If parameters are on the meta device of the process whose weights count.
    """
    bare = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if bare and (is_source or not sync):
        raise ValueError(
            f"{type(model).__name__}.{bare[0]} (and {len(bare) - 1} more) is on the meta device, so that "
            "there are no weights to shard. Load them on rank 0; other processes may stay on meta with "
            "FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)."
        )


def upcast(model: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> list[str]:
    """Make trainable parameters float32, which mixed precision casts for computing; returns their names."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in ignored and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
            changed.append(name)
    return changed


def shard(
    model: torch.nn.Module,
    groups: Iterable[torch.nn.Module],
    ignored: set[torch.nn.Parameter],
    how: Sharding,
) -> torch.nn.Module:
    """Shard the groups, inner ones first, and then the rest of the model.

    Each group is brought to the device and filled with the first process's weights just before it is
    sharded: no process ever holds more than its own copy of the model and one group.
    """
    keep = _place_rest(model, ignored, how)
    options: dict[str, Any] = {"mesh": how.mesh, "mp_policy": how.precision}
    if keep:
        options["ignored_params"] = keep
    if how.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=how.device.type != "cpu")
    for module in [*groups, model]:
        _materialise(model, module, keep, how)
        # The outermost group is needed again at once in backward, so that torch keeps it by default.
        reshard = None if module is model and how.reshard_after_forward else how.reshard_after_forward
        fully_shard(module, reshard_after_forward=reshard, **options)
    return model


def _place_rest(
    model: torch.nn.Module, ignored: set[torch.nn.Parameter], how: Sharding
) -> set[torch.nn.Parameter]:
    """Fill buffers and what is not sharded; returns the latter, new objects where they were on meta."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _filled(buffer, how)
    keep = set()
    for parameter, names in aliases(model).items():
        if parameter in ignored:
            keep.add(_fill_parameter(model, parameter, names, how))
    return keep


def _materialise(
    model: torch.nn.Module, group: torch.nn.Module, keep: set[torch.nn.Parameter], how: Sharding
) -> None:
    names = aliases(model)
    done = {
        parameter
        for part in group.modules()
        if isinstance(part, FSDPModule)
        for parameter in part.parameters()
    }
    for parameter in list(group.parameters()):
        if parameter not in keep and parameter not in done:
            _fill_parameter(model, parameter, names[parameter], how)


def _fill_parameter(
    model: torch.nn.Module, parameter: torch.nn.Parameter, names: Sequence[str], how: Sharding
) -> torch.nn.Parameter:
    if not parameter.is_meta:
        parameter.data = _filled(parameter.data, how)
        return parameter
    fresh = torch.nn.Parameter(_filled(parameter.detach(), how), requires_grad=parameter.requires_grad)
    for name in names:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, fresh)
    return fresh


@torch.no_grad()
def _filled(value: torch.Tensor, how: Sharding) -> torch.Tensor:
    """The tensor on the device, as the first process has it."""
    if value.is_meta:
        value = torch.empty_like(value, device=how.device)
    value = value.to(how.device)
    if how.sync and value.numel():
        own = local(value)
        whole = own.contiguous()
        for axis in range(how.mesh.ndim):
            if how.mesh.size(axis) > 1:
                dist.broadcast(whole, group=how.mesh.get_group(axis), group_src=0)
        if whole is not own:
            own.copy_(whole)
    return value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
