"""Parallelism over one device mesh: FSDP2, HSDP, tensor and context parallelism, and their combinations.

How a model becomes parallel is the function `parallelize`, read from top to bottom.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from accel.engines.context import EngineContext, Prepared
from accel.engines.sharded import ShardedEngine, tell_upcast
from accel.parallel import held_back, norms
from accel.parallel.checkpointing import apply_activation_checkpointing
from accel.parallel.context import ContextParallel
from accel.parallel.filling import Filling, fill_group, fill_rest
from accel.parallel.full_state import WholeModel, WholeOptimizer, gather_whole
from accel.parallel.language_models import check_language_models, tell_part
from accel.parallel.repoint import Replaced, repoint
from accel.parallel.sharding import Sharding, check_dtypes, check_ignored, shard, upcast
from accel.parallel.tensor import forget_meshes, is_split, split_weights, tensor_plan
from accel.parallel.wrapping import aliases, choose_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from accel.plugins.fsdp import FullyShardedDataParallelPlugin

__all__ = ["MeshEngine", "Meshes", "Plan", "parallelize", "plan_for"]


@dataclass(frozen=True)
class Meshes:
    """The axes that the engine works on.

    Attributes:
        fsdp: Shards, or replicas x shards; None: models are not sharded.
        tensor: The tensor-parallel group; None: weights are not split.
        context: The context-parallel group; None: sequences are not split.
    """

    fsdp: DeviceMesh | None
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @property
    def copies(self) -> int:
        """Processes that work on the same samples together."""
        return self.tensor_size * (1 if self.context is None else self.context.size())

    @property
    def has_one_shard(self) -> bool:
        """Whether models are whole on each replica, but for tensor parallelism."""
        return self.fsdp is not None and self.fsdp.ndim == 2 and self.fsdp.size(1) == 1

    @property
    def tensor_size(self) -> int:
        """Processes that split each weight."""
        return 1 if self.tensor is None else self.tensor.size()


@dataclass(frozen=True)
class Plan:
    """What is done to one model.

    Attributes:
        filling: Where its weights come from and go to.
        sharding: How it is sharded; None: not at all.
        tensor: How its weights are split over the tensor-parallel group; empty: not at all.
        tensor_mesh: The axis of that group.
        groups: The modules that are sharded by themselves, inner ones first.
        ignored: The parameters that are left whole.
        checkpointed: The modules that compute their activations again in backward.
        offload_activations: Whether what these keep rests on the CPU.
        upcasts: Whether trainable parameters are kept in float32.
    """

    filling: Filling
    sharding: Sharding | None
    tensor: dict[str, ParallelStyle]
    tensor_mesh: DeviceMesh | None
    groups: tuple[torch.nn.Module, ...]
    ignored: set[torch.nn.Parameter]
    checkpointed: tuple[torch.nn.Module, ...]
    offload_activations: bool
    upcasts: bool


def parallelize(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Make a model parallel; the order matters."""
    if plan.upcasts:
        tell_upcast(model, upcast(model, plan.ignored))
    # Checkpointing changes the forward that the sharding's hooks go around: parameters are gathered once for
    # the second computation too.
    apply_activation_checkpointing(plan.checkpointed, plan.offload_activations)
    pending = dict(plan.tensor)

    def split(group: torch.nn.Module) -> None:
        if plan.tensor_mesh is not None:
            split_weights(model, group, pending, plan.tensor_mesh, plan.filling)

    if plan.sharding is not None:
        # Group by group: sharding takes the parts that splitting leaves, and not the other way round.
        return shard(model, plan.groups, plan.ignored, plan.sharding, split)
    keep = fill_rest(model, plan.ignored, plan.filling)
    split(model)
    done = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    fill_group(model, model, keep | done, plan.filling)
    return model


def plan_for(
    model: torch.nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    meshes: Meshes,
    context: EngineContext,
) -> Plan:
    """Decide what is done to a model, and refuse what cannot be done; nothing is changed.

    Raises:
        ValueError: If the model and the settings do not fit; the message names the fix.
    """
    chosen = choose_groups(model, plugin)
    groups, ignored = chosen.modules, chosen.ignored
    process, is_mixed = context.process, context.precision.is_mixed
    mesh = meshes.fsdp
    filling = _filling(meshes, process.device, _sends_weights(plugin))
    needs_plan = not is_split(model, meshes.tensor_size) and meshes.tensor is not None
    tensor = tensor_plan(model, meshes.tensor_size) if needs_plan else {}
    if tensor and ignored:
        raise ValueError(
            f"ignored_modules={plugin.ignored_modules!r} beside tp_size={meshes.tensor_size}: which "
            "parameters are ignored is not kept when tensor parallelism splits them. Leave one of the two "
            "out."
        )
    offloads = bool(plugin.activation_checkpointing_offload)
    split = (tensor, meshes.tensor, groups, ignored, chosen.checkpointed, offloads, is_mixed)
    if mesh is None:
        return Plan(filling, None, *split)
    check_ignored(model, ignored, mesh.size())
    check_dtypes(model, groups, is_mixed)
    policy = copy.copy(plugin)  # its own, as the precision is completed for this Accelerator
    # Replicas that nobody asked to shard keep their parameters, as those of DDP do: autocast alone casts.
    is_plain = meshes.has_one_shard and context.fsdp is None
    policy.set_mixed_precision("no" if is_plain else context.precision.name)
    sharding = Sharding(
        filling=filling,
        reshard_after_forward=plugin.reshard_after_forward and not is_plain,
        precision=policy.mixed_precision_policy,
        offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    )
    return Plan(filling, sharding, *split)


class MeshEngine(ShardedEngine):
    """Parameters, gradients and optimizer states in shards over the axes of a mesh."""

    name = "fsdp2"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        forget_meshes()
        self._meshes = _find_meshes(context)
        data = "ddp" if self._meshes.has_one_shard and context.fsdp is None else "fsdp2"
        axes = {data: self._meshes.fsdp, "cp": self._meshes.context, "tp": self._meshes.tensor}
        self.name = " x ".join(name for name, axis in axes.items() if axis is not None)
        self._sequences = _share_sequences(context, self._meshes)
        self._replaced = Replaced()
        self._parts: weakref.WeakSet[FSDPModule] = weakref.WeakSet()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the parallelism configuration; without one, all processes in a row of shards."""
        return self.context.mesh if self.context.mesh is not None else self._meshes.fsdp

    @property
    def copies(self) -> int:
        """The processes of a group that splits weights or sequences work on the same samples."""
        return self._meshes.copies

    @property
    def gradient_shards(self) -> int:
        """All processes but those of one tensor-parallel group have gradients of their own."""
        return self.context.process.world_size // self._meshes.tensor_size

    def check(self, objects: Prepared) -> None:
        """Refuse what cannot be made parallel, before anything is changed."""
        self._note_gathered()
        super().check(objects)
        if self._sequences is not None:
            for model in objects.models:
                check_language_models(model)

    @property
    def sends_weights(self) -> bool:
        """As the plugin's sync_module_states says."""
        return _sends_weights(self.plugin)

    @property
    def needs_weights(self) -> bool:
        """Where weights come from: on the first process of each group that gets them from one."""
        sync = self.sends_weights
        groups = _filling(self._meshes, self.context.process.device, sync).groups
        return not sync or all(dist.get_rank(group) == 0 for group in groups)

    def check_model(self, model: torch.nn.Module) -> None:
        """Refuse a model that does not fit the settings; nothing is changed."""
        plan_for(model, self.plugin, self._meshes, self.context)

    def is_done(self, model: torch.nn.Module) -> bool:
        """Whether the model is sharded already."""
        plain = getattr(model, "_orig_mod", model)
        return isinstance(plain, FSDPModule) or plain in self._models

    def repoint(self, optimizer: Any) -> None:
        """Give an optimizer the parameters that models have now, in shards."""
        self._note_gathered()
        repoint(optimizer, self._replaced)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by those of fp8, whose weights are gathered in fp8 where they are sharded."""
        if self.context.fp8 is not None and not self.is_done(model):
            before = aliases(model)
            self.context.fp8.convert(model, self._meshes.fsdp is not None and not evaluation_mode)
            self._replaced.note(before, model)

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """As for all sharded engines; language models learn which part of each sequence they see."""
        model = super().prepare_model(model, place, evaluation_mode)
        if self._sequences is not None:
            tell_part(model, self._sequences.present)
        return model

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place; twice is once."""
        plain = getattr(model, "_orig_mod", model)
        if not self.is_done(model):
            plan = plan_for(model, self.plugin, self._meshes, self.context)
            before = aliases(model)
            model = plain = parallelize(model, plan)
            self._replaced.note(before, model)
        self._models.add(plain)
        self._parts.update(part for part in plain.modules() if isinstance(part, FSDPModule))
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """As for all sharded engines; no forward pass computes with what was gathered before a step."""
        parts = self._parts  # not the engine, which the optimizer may outlive
        optimizer.register_step_pre_hook(lambda *_: held_back.free_gathered(parts))
        return super().prepare_optimizer(optimizer, place)

    # Gradients

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a context-parallel group has its part of sequences."""
        if self._sequences is None:
            return super().context_parallel(buffers, dims, no_restore)
        return self._sequences.sharing(buffers, dims, no_restore)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, while sequences are shared that were shared in forward."""
        if self._sequences is not None:
            self._sequences.check_backward()
        super().backward(loss, **kwargs)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward keeps whole gradients instead of reducing them."""
        sharded = _sharded(model)
        return contextlib.nullcontext() if sharded is None else held_back.holding(sharded)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced ones and those that are held back."""
        # Parameters that are gathered right now show the gradient that is held back: each is scaled once.
        every = [*norms.gradients_of(parameters), *held_back.gradients(self._models)]
        norms.scale({id(gradient): gradient for gradient in every}.values(), factor)

    def _note_gathered(self) -> None:
        for whole, sharded in held_back.gathered(self._models):
            self._replaced.add(whole, sharded)

    def present(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The shard of a parameter: a forward pass may have left gathered ones in the model."""
        return self._replaced.present(parameter)

    def with_gradients(self, parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
        """The shards of parameters that have no gradients themselves."""
        given = super().with_gradients(parameters)
        if not any(item.requires_grad and item.grad is None for item in given):
            return given
        self._note_gathered()
        return [
            self.present(item) if isinstance(item, torch.nn.Parameter) and item.grad is None else item
            for item in given
        ]

    def grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The total norm of the reduced gradients, over all shards."""
        gradients = norms.gradients_of(self.with_gradients(parameters))
        return norms.total_norm(gradients, norm_type, self.context.process.device)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm over all shards; returns the norm before clipping."""
        gradients = norms.gradients_of(self.with_gradients(parameters))
        norm = norms.total_norm(gradients, norm_type, self.context.process.device)
        norms.scale(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip each gradient, in shards."""
        super().clip_grad_value(self.with_gradients(parameters), clip_value)

    # States

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state, on the first process of each machine; others take part and get an empty dict."""
        state = self.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        keep = self.context.process.is_local_main
        whole = gather_whole(state, keep)
        return {name: _detached(value) for name, value in whole.items()} if keep else {}

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The model as a whole state is loaded into it."""
        inner = self.unwrap_model(model, keep_torch_compile=False)
        return WholeModel(inner) if self.is_done(inner) else model

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer with its whole state, which is gathered now, by all processes."""
        return WholeOptimizer(
            optimizer, gather_whole(optimizer.state_dict(), self.context.process.is_local_main)
        )

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as a whole state is loaded into it."""
        return WholeOptimizer(optimizer)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _sharded(model: torch.nn.Module) -> FSDPModule | None:
    plain = getattr(model, "_orig_mod", model)
    return plain if isinstance(plain, FSDPModule) else None


def _find_meshes(context: EngineContext) -> Meshes:
    """The axes that models are sharded, replicated and split over.

    Raises:
        ValueError: If the axes do not go together; the message names the alternative.
    """
    mesh, config, process = context.mesh, context.parallelism, context.process
    kind, size = process.device.type, process.world_size
    if mesh is None or config is None:
        return Meshes(init_device_mesh(kind, (size,), mesh_dim_names=("dp_shard",)))
    tensor = mesh["tp"] if config.tp_enabled else None
    if tensor is not None and config.tp_handler is not None and config.tp_handler.enable_async_tp:
        warnings.warn(
            "TorchTensorParallelConfig(enable_async_tp=True) is ignored: only compiled code on accelerators "
            "can overlap these, and that is not there yet. Leave it out.",
            stacklevel=2,
        )
    if tensor is not None and config.dp_replicate_enabled and not config.dp_shard_cp_dim_names:
        # Replicas alone, each one shard, on one mesh with the axis that splits weights.
        sizes = (mesh["dp_replicate"].size(), 1, tensor.size())
        whole = init_device_mesh(kind, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        return Meshes(whole["dp_replicate", "dp_shard"], whole["tp"])
    if config.dp_shard_cp_dim_names:
        sequences = mesh["cp"] if config.cp_enabled else None
        return Meshes(config.get_submesh(config.fsdp_dim_names), tensor, sequences)
    if tensor is None:  # replicas alone: each is one shard
        return Meshes(init_device_mesh(kind, (size, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
    if context.fsdp is not None:
        raise ValueError(
            f"fsdp_plugin beside tp_size={config.tp_size} on {size} processes leaves nothing to shard over. "
            "Give dp_shard_size (and that many times the processes), or leave fsdp_plugin out."
        )
    return Meshes(None, tensor)


def _sends_weights(plugin: FullyShardedDataParallelPlugin) -> bool:
    return plugin.sync_module_states is not False or bool(plugin.cpu_ram_efficient_loading)


def _filling(meshes: Meshes, device: torch.device, sync: bool) -> Filling:
    if meshes.fsdp is not None:
        return Filling(meshes.fsdp, device, sync, tensor=meshes.tensor)
    assert meshes.tensor is not None, "one of the two axes is there"
    return Filling(meshes.tensor, device)


def _share_sequences(context: EngineContext, meshes: Meshes) -> ContextParallel | None:
    config = context.parallelism
    if meshes.context is None or config is None or config.cp_handler is None:
        return None
    rotation = config.cp_handler.cp_comm_strategy
    assert rotation is not None, "the environment has a default"
    return ContextParallel(meshes.context, rotation)
