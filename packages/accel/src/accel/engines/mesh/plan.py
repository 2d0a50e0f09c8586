"""How a model is parallelized over a device mesh: the function `parallelize`, read from top to bottom."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from accel.engines.base.context import EngineContext
from accel.engines.common.checks import check_hooks
from accel.engines.mesh.shard import Sharding, check_dtypes, check_ignored, shard, upcast
from accel.engines.mesh.tensor.split import is_split, split_weights, tensor_plan
from accel.engines.sharded.activation_checkpointing import apply_activation_checkpointing
from accel.engines.sharded.engine import warn_of_upcast
from accel.engines.sharded.groups import Groups, aliases
from accel.engines.sharded.initial_weights import WeightSource, materialize_group, materialize_rest
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin


@dataclass(frozen=True)
class Meshes:
    """The mesh axes that the engine uses.

    Attributes:
        fsdp: Shards, or replicas x shards; None: models are not sharded.
        tensor: The tensor-parallel group; None: weights are not split.
        context: The context-parallel group; None: sequences are not split.
    """

    fsdp: DeviceMesh | None
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def model_parallel_size(self) -> int:
        """Processes that work on the same samples."""
        return self.tensor_size * (1 if self.context is None else self.context.size())

    @property
    def has_one_shard(self) -> bool:
        """Whether each replica is one shard, apart from tensor parallelism."""
        return self.fsdp is not None and self.fsdp.ndim == 2 and self.fsdp.size(1) == 1

    @property
    def tensor_size(self) -> int:
        """Processes that split each weight."""
        return 1 if self.tensor is None else self.tensor.size()


@dataclass(frozen=True)
class ParallelPlan:
    """The steps that parallelize one model.

    Attributes:
        source: Where its weights come from and go to.
        sharding: How it is sharded; None: not sharded.
        tensor: How its weights are split over the tensor-parallel group; empty: not split.
        tensor_mesh: The axis of that group.
        groups: The modules that are sharded separately, inner ones first.
        ignored: The parameters that are not sharded.
        checkpointed: The modules that recompute their activations in backward.
        offload_activations: Whether their saved inputs are kept on the CPU.
        upcasts: Whether trainable parameters are kept in float32.
    """

    source: WeightSource
    sharding: Sharding | None
    tensor: dict[str, ParallelStyle]
    tensor_mesh: DeviceMesh | None
    groups: tuple[torch.nn.Module, ...]
    ignored: set[torch.nn.Parameter]
    checkpointed: tuple[torch.nn.Module, ...]
    offload_activations: bool
    upcasts: bool


def parallelize(model: torch.nn.Module, plan: ParallelPlan) -> torch.nn.Module:
    """Parallelize a model; the order matters."""
    if plan.upcasts:
        warn_of_upcast(model, upcast(model, plan.ignored))
    # Checkpointing changes the forward that the sharding's hooks wrap: parameters are gathered once for
    # the second computation too.
    apply_activation_checkpointing(plan.checkpointed, plan.offload_activations)
    names = aliases(model)
    pending = {model.get_submodule(name): (name, style) for name, style in plan.tensor.items()}

    def split(group: torch.nn.Module) -> None:
        if plan.tensor_mesh is not None:
            split_weights(model, group, pending, names, plan.tensor_mesh, plan.source)

    if plan.sharding is not None:
        # Group by group: split weights can be sharded, and not the other way round.
        return shard(model, plan.groups, plan.ignored, names, plan.sharding, split)
    keep = materialize_rest(model, plan.ignored, plan.source)
    split(model)
    done = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    materialize_group(model, model, keep | done, names, plan.source)
    return model


def plan_for(
    model: torch.nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    meshes: Meshes,
    context: EngineContext,
    chosen: Groups,
) -> ParallelPlan:
    """Decide what is done to a model, and reject what cannot be done; nothing is changed.

    Args:
        model: The model.
        plugin: The settings.
        meshes: The axes.
        context: What the engine knows.
        chosen: The model's groups, as chosen.

    Raises:
        ValueError: If the model and the settings do not fit; the message names the fix.
    """
    groups, ignored = chosen.modules, chosen.ignored
    process, is_mixed = context.process, context.precision.is_mixed
    mesh = meshes.fsdp
    source = weight_source(meshes, process.device, sends_weights(plugin))
    # A model that was loaded with a tp_plan is split already, and may have no plan.
    split_already = is_split(model, meshes.tensor_size, "fsdp2" if mesh is not None else "tp")
    if split_already and mesh is not None:
        _check_mesh(model, meshes.tensor)
    needs_plan = not split_already and meshes.tensor is not None
    tensor = tensor_plan(model, meshes.tensor_size) if needs_plan else {}
    # A hook would unexpectedly get shards of gradients.
    fix = "Take the module out of the plan, or change gradients between backward() and step()."
    check_hooks(model, "tensor parallelism (tp)", fix, tensor)
    if mesh is not None:  # sharding keeps hooks of register_hook
        fix = "Do it between backward() and step(), or train under DDP."
        check_hooks(model, "fsdp2", fix, gradients=False)
    if tensor and ignored:
        raise ValueError(
            f"ignored_modules={plugin.ignored_modules!r} with tp_size={meshes.tensor_size}: which "
            "parameters are ignored is not kept when tensor parallelism splits them. Leave one of the two "
            "out."
        )
    offloads = bool(plugin.activation_checkpointing_offload)
    split = (tensor, meshes.tensor, groups, ignored, chosen.checkpointed, offloads, is_mixed)
    if mesh is None:
        return ParallelPlan(source, None, *split)
    check_ignored(model, ignored, mesh.size())
    check_dtypes(model, groups, is_mixed)
    policy = copy.copy(plugin)  # a copy: the precision is completed for this Accelerator
    # Replicas without requested shards keep their parameters, as under DDP: only autocast casts.
    is_plain = meshes.has_one_shard and context.settings is None
    policy.set_mixed_precision("no" if is_plain else context.precision.name)
    sharding = Sharding(
        source=source,
        reshard_after_forward=plugin.reshard_after_forward and not is_plain,
        precision=policy.mixed_precision_policy,
        offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    )
    return ParallelPlan(source, sharding, *split)


def _check_mesh(model: torch.nn.Module, tensor: DeviceMesh | None) -> None:
    """Reject weights that were split over another mesh than the one whose other axes shard them."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh != tensor:
            raise ValueError(
                f"{type(model).__name__}.{name} is split over a mesh that the script made, and fsdp2 x tp "
                "shards it over another axis of the same mesh. Split over "
                "accelerator.torch_device_mesh['tp'], or leave the splitting to prepare() (model._tp_plan)."
            )


def find_meshes(context: EngineContext) -> Meshes:
    """Build the axes that the plan decided: those that models are sharded, replicated and split over."""
    axes, config, full = context.mesh_axes, context.parallelism, context.mesh
    is_shared = full is not None and full.mesh_dim_names == tuple(axes)
    if full is None or not is_shared:
        device = context.process.device.type
        full = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    tensor = full["tp"] if "tp" in axes else None
    handler = None if tensor is None or config is None else config.tp_handler
    if handler is not None and handler.enable_async_tp:
        warn(
            "TorchTensorParallelConfig(enable_async_tp=True) is ignored: only compiled code on accelerators "
            "can overlap these, which is not supported yet. Leave it out.",
        )
    if is_shared and config is not None:
        data = config.get_submesh(config.fsdp_dim_names) if config.dp_shard_cp_dim_names else None
        return Meshes(data, tensor, full["cp"] if "cp" in axes else None)
    return Meshes(full[tuple(axis for axis in axes if axis != "tp")], tensor)


def sends_weights(plugin: FullyShardedDataParallelPlugin) -> bool:
    """Whether the weights of the first process are used; else each process shards its own weights."""
    return plugin.sync_module_states is not False or bool(plugin.cpu_ram_efficient_loading)


def weight_source(meshes: Meshes, device: torch.device, sync: bool) -> WeightSource:
    """Where the weights of models on these axes come from and go to."""
    if meshes.fsdp is not None:
        return WeightSource(meshes.fsdp, device, sync, tensor=meshes.tensor)
    assert meshes.tensor is not None, "one of the two axes is there"
    return WeightSource(meshes.tensor, device)
