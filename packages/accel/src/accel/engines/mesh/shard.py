"""Sharding a model with `fully_shard`, one group at a time, from the first process's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accel.engines.mesh.fsdp2_private import reshard_after_evaluation
from accel.engines.mesh.shared_meshes import SharedMeshes
from accel.engines.sharded.initial_weights import Names, WeightSource, materialize_group, materialize_rest


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        source: The mesh (one axis of shards, or replicas x shards), the device, and whose weights count.
        reshard_after_forward: Whether gathered parameters are freed after forward.
        precision: Dtypes of parameters in computing, and of gradients in reduction.
        offload: Whether shards are kept on the CPU.
    """

    source: WeightSource
    reshard_after_forward: bool = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: bool = False


def check_dtypes(model: torch.nn.Module, groups: Sequence[torch.nn.Module], mixed: bool) -> None:
    """Reject parameters that cannot be in one group; torch would only do so in the first forward pass.

    Raises:
        ValueError: If the trainable parameters of a group have several dtypes.
    """
    # Reversed: the innermost group comes first, and wins.
    group_of = {parameter: module for module in groups[::-1] for parameter in module.parameters()}
    found: dict[torch.nn.Module, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not mixed:
            found.setdefault(group_of.get(parameter, model), {}).setdefault(parameter.dtype, name)
    for module, dtypes in found.items():
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} in {dtype}" for dtype, name in dtypes.items())
            raise ValueError(
                f"FSDP shards the trainable parameters of one {type(module).__name__} together, and "
                f"they have several dtypes: {listed}. Cast them to one, or train with "
                "mixed_precision='bf16', which keeps trainable parameters in float32."
            )


def check_ignored(model: torch.nn.Module, ignored: set[torch.nn.Parameter], size: int) -> None:
    """Reject trainable parameters whose gradients would not be reduced.

    Raises:
        ValueError: If there are any, and several data-parallel processes.
    """
    named = [name for name, item in model.named_parameters() if item in ignored and item.requires_grad]
    if named and size > 1:
        raise ValueError(
            f"ignored_modules leaves {', '.join(named)} unsharded, and their gradients would not be averaged "
            "between processes. Freeze them with requires_grad_(False), or do not ignore them."
        )


def check_layout(
    model: torch.nn.Module, engine: str, ignored: Collection[torch.nn.Parameter] = (), strided: bool = False
) -> None:
    """Reject parameters that cannot be sharded, or sent as bytes (DeepSpeed does that at stage 0 too).

    torch and DeepSpeed would fail half-way.

    Args:
        model: The model.
        engine: The name of the engine.
        ignored: Parameters that are not sharded.
        strided: Whether any strides are accepted.

    Raises:
        ValueError: If there are any; the message names one, and the fix.
    """
    left = {id(item) for item in ignored}
    for name, parameter in model.named_parameters():
        is_sharded = isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")  # by deepspeed.zero.Init
        if id(parameter) in left or is_sharded:
            continue
        fix = ""
        if parameter.dim() == 0:
            fix = "has no dimension. Make it a vector of one element"
        elif not strided and not parameter.numel():
            fix = "has no elements. Make it a buffer"
        elif not strided and not parameter.is_contiguous():
            fix = f"has strides {parameter.stride()}. Make it contiguous: parameter.data.contiguous()"
        if fix:
            raise ValueError(f"{type(model).__name__}.{name} cannot be prepared under {engine}: it {fix}.")


def check_unshared(
    models: Iterable[torch.nn.Module], engine: str, is_sharded: Callable[[torch.Tensor], bool]
) -> None:
    """Reject models that share parameters with each other, or with one that is sharded already.

    Args:
        models: The models to shard.
        engine: The name of the engine.
        is_sharded: Whether a parameter is sharded already.

    Raises:
        ValueError: If there are any; the message names a parameter, and the fix.
    """
    owners: dict[torch.nn.Parameter, torch.nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                raise ValueError(
                    f"{type(model).__name__}.{name} is sharded already: it belongs to a model that was "
                    f"prepared before, and {engine} shards each parameter for one model. Use the model that "
                    "prepare() returned instead of its unwrapped one; or put models that share modules into "
                    "one torch.nn.Module, and prepare that."
                )
            if owners.setdefault(parameter, model) is not model:
                raise ValueError(
                    f"{type(owners[parameter]).__name__} and {type(model).__name__} share {name}, and "
                    f"{engine} shards each parameter for one model. Put both into one torch.nn.Module, and "
                    "prepare that."
                )


def check_sparse(model: torch.nn.Module, engine: str, ignored: Collection[torch.nn.Parameter] = ()) -> None:
    """Reject sparse gradients, which cannot be sharded; torch and DeepSpeed would fail in backward.

    Args:
        model: The model.
        engine: The name of the engine.
        ignored: Parameters that are not sharded.

    Raises:
        ValueError: If a trainable embedding has sparse gradients; the message names it, and the fix.
    """
    left = {id(item) for item in ignored}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not module.sparse:
            continue
        if module.weight.requires_grad and id(module.weight) not in left:
            raise ValueError(
                f"{name} of {type(model).__name__} has sparse=True, and {engine} cannot shard sparse "
                "gradients. Set sparse=False, or freeze it."
            )


def upcast(model: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> list[str]:
    """Upcast trainable parameters to float32 for mixed precision; returns their names."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in ignored and parameter.dtype.itemsize < 4:
            # Through .data: optimizers may have this parameter object.
            parameter.data = parameter.data.float()
            changed.append(name)
    return changed


def shard(
    model: torch.nn.Module,
    groups: Iterable[torch.nn.Module],
    ignored: set[torch.nn.Parameter],
    names: Names,
    how: Sharding,
    split: Callable[[torch.nn.Module], None] = lambda group: None,
) -> torch.nn.Module:
    """Shard the groups, inner ones first, and then the rest of the model.

    Each group is moved to the device and filled with the first process's weights just before it is sharded:
    no process ever needs memory for more than its copy of the model and one group. DTensors are left alone.

    Args:
        model: The model.
        groups: Its modules that are sharded separately.
        ignored: Parameters that are not sharded.
        names: The names of all parameters.
        how: How the other parameters are sharded.
        split: Called for each group first, to split weights over another axis.
    """
    # Buffers and ignored parameters are not sharded, so they have to start equal on all processes.
    keep = materialize_rest(model, ignored, how.source)
    options: dict[str, Any] = {"mp_policy": how.precision}
    # Not if it is empty: `fully_shard` would leave out modules without parameters too.
    if keep:
        options["ignored_params"] = keep
    # Memory can be pinned only with an accelerator.
    if how.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=how.source.device.type != "cpu")
    meshes = SharedMeshes()
    for module in [*groups, model]:
        # Tensor parallelism first: `fully_shard` shards the DTensors that it leaves over a second axis.
        split(module)
        done = {item for item in module.parameters() if isinstance(item, DTensor)}
        materialize_group(model, module, keep | done, names, how.source)
        # Backward needs the outermost group first, so torch keeps it unsharded by default.
        reshard = None if module is model and how.reshard_after_forward else how.reshard_after_forward
        sharded = fully_shard(module, mesh=how.source.mesh, reshard_after_forward=reshard, **options)
        meshes.deduplicate_meshes(sharded)
        if not reshard:
            reshard_after_evaluation(sharded, keeps_frozen=not how.reshard_after_forward)
    return model
