"""FSDP2, HSDP, tensor and context parallelism over one device mesh, and their combinations."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from accel.engines import fsdp2_gradients
from accel.engines.common import norms
from accel.engines.common.checks import check_hooks
from accel.engines.common.create_graph import reject_create_graph
from accel.engines.common.full_state import FullStateModel, FullStateOptimizer, gather_full_state, with_names
from accel.engines.common.gradients import gradients_of
from accel.engines.common.layouts import check_ignored, is_split
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.common.swap_parameters import swap_parameters
from accel.engines.context import DataParallel, EngineContext, PrepareRequest
from accel.engines.context_parallel import ContextParallel
from accel.engines.fsdp2_gradients import reshard_after_evaluation, sharded_parameters
from accel.engines.fsdp_groups import Groups, aliases, apply_activation_checkpointing
from accel.engines.initial_weights import Names, WeightSource, materialize_group, materialize_rest
from accel.engines.language_models import check_language_models, complete_inputs_for
from accel.engines.sharded_engine import ShardedEngine, warn_of_upcast
from accel.engines.tensor_parallel import SharedRandomState, split_weights, tensor_plan
from accel.engines.torch_private import clear_sharding_caches, gradient_hooks, layout_of, uncompiled
from accel_optim.parameter_map import ParameterMap
from accel_state.logging.warning import warn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin


class MeshEngine(ShardedEngine):
    """Parameters, gradients and optimizer states sharded over the axes of a mesh."""

    name = "fsdp2"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self._unused: list[Any] = []  # parameters without a gradient here, until the window ends
        # A previous Accelerator may have had process groups that are gone.
        clear_sharding_caches()
        self._meshes = find_meshes(context)
        self.name = context.name
        self._sequences = _context_parallel(context, self._meshes)
        process, sharers = context.process, self._meshes.model_parallel_size
        self.data_parallel = DataParallel(
            # Processes that split weights or sequences work on the same samples.
            process.rank // sharers,
            process.world_size // sharers,
            # Without a configuration of the mesh, one axis of shards over all processes.
            context.mesh if context.mesh is not None else self._meshes.fsdp,
            # Gradients differ between all processes except within a tensor-parallel group.
            reduced_over=process.world_size // self._meshes.tensor_size,
            sequences=self._sequences,
        )

    def _make_parameters(self, send: Callable[[Sequence[torch.Tensor]], None] | None) -> ParameterMap:
        # The modules that shard parameters.
        self._units: weakref.WeakKeyDictionary[FSDPModule, None] = weakref.WeakKeyDictionary()
        return ParameterMap(
            send,
            partial(fsdp2_gradients.unsharded_parameters, self._units),
            partial(fsdp2_gradients.reshard, self._units),
        )

    def _check_locally(self, request: PrepareRequest) -> None:
        super()._check_locally(request)
        if self._sequences is not None:
            for model in request.models:
                check_language_models(model)

    @property
    def sends_weights(self) -> bool:
        """The plugin's sync_module_states."""
        return sends_weights(self.plugin)

    @property
    def needs_weights(self) -> bool:
        """On the processes that weights come from: the first of each group that broadcasts them."""
        sync = self.sends_weights
        # Weights are broadcast axis by axis, from the first process of each group.
        groups = weight_source(self._meshes, self.context.process.device, sync).groups
        return not sync or all(dist.get_rank(group) == 0 for group in groups)

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject a model that does not fit the settings; nothing is changed."""
        plan_for(model, self.plugin, self._meshes, self.context, self.groups_of(model))

    def is_wrapped(self, model: torch.nn.Module) -> bool:
        """Whether the model is sharded already."""
        plain = uncompiled(model)
        return isinstance(plain, FSDPModule) or plain in self._models

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of a model that is sharded already."""
        return self.parameters.in_model(parameter)

    def swap_parameters(self, optimizer: Any) -> None:
        """Replace the optimizer's parameters by the shards that models have now."""
        swap_parameters(optimizer, self.parameters.trained)

    def _convert_to_fp8(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        if self.context.fp8 is not None and not self.is_wrapped(model):
            before = aliases(model)
            # Weights that are sharded are gathered in fp8.
            self.context.fp8.convert(model, self._meshes.fsdp is not None and not evaluation_mode)
            self.forget_groups(model)  # their modules may have been replaced
            self.parameters.record_model(before, dict(model.named_parameters(remove_duplicate=False)))

    def _prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        model = super()._prepare_model(model, place, evaluation_mode)
        if self._sequences is not None:
            complete_inputs_for(model, self._sequences.current)
        return model

    def setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place; idempotent."""
        plain = uncompiled(model)
        if not self.is_wrapped(model):
            chosen = self.groups_of(model)
            self.forget_groups(model)
            plan = plan_for(model, self.plugin, self._meshes, self.context, chosen)
            before = aliases(model)
            model = plain = parallelize(model, plan)
            # Afterwards: the parameters are new, and optimizers may have the previous ones.
            self._add(plain, before)
            if isinstance(plain, FSDPModule) and callable(getattr(plain, "generate", None)):
                # transformers' generate() calls submodules directly, without gathering the root's weights.
                register_fsdp_forward_method(plain, "generate")
            if self._meshes.tensor is not None:
                SharedRandomState(self._meshes.tensor.get_group(), self.context.process.device).attach(plain)
        self._models[plain] = None
        return model

    def _add(self, model: torch.nn.Module, before: dict[torch.nn.Parameter, list[str]]) -> None:
        """Record a model that was parallelized, and let torch reduce its gradients as one process would.

        A parameter exists in up to three forms: as the original model had it, as the shard that optimizers
        step, and unsharded, as the module has it between forward and backward. All map to the shard.

        Args:
            model: The model.
            before: The parameters that it had before, with their names.
        """
        self.parameters.record_model(before, dict(model.named_parameters(remove_duplicate=False)))
        self.parameters.add_model(model)
        hooks = {id(self.parameters.trained(old)): found for old in before if (found := gradient_hooks(old))}
        units: dict[str, Any] = {
            name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)
        }
        self._units.update(dict.fromkeys(units.values()))
        for unit in units.values():
            fsdp2_gradients.reduce_unused_as_zeros(unit, self._unused)
            fsdp2_gradients.move_hooks(unit, hooks)
        split = (
            module
            for module in model.modules()
            if any(isinstance(item, DTensor) for item in module.parameters(recurse=False))
        )
        reject_create_graph([model, *(units.values() or split)], self.name)
        check_same_order(model, units, self.context.process, self.name, FSDP_FIX)
        if isinstance(model, FSDPModule):
            # Makes `model.zero_grad()` clear unreduced gradients too.
            fsdp2_gradients.patch_zero_grad(model)

    # In a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, inside the context-parallel context of its forward pass.

        Raises:
            RuntimeError: If the loss has a weight penalty that mixes DTensors with plain tensors.
        """
        if self._sequences is not None:
            self._sequences.check_backward()
        try:
            super().backward(loss, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(
                f"{error} Under {self.name} parameters are sharded DTensors, except those that "
                "are unsharded between forward and backward. In a weight penalty use full tensors: "
                "sum((p.full_tensor() if isinstance(p, DTensor) else p).square().sum() for p in "
                "model.parameters()); or set the optimizer's weight_decay."
            ) from error

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward accumulates full gradients instead of reducing them."""
        plain = uncompiled(model)
        if not isinstance(plain, FSDPModule):
            return contextlib.nullcontext()
        return self._no_sync(fsdp2_gradients.no_sync(plain))

    def reduce_accumulated(self) -> None:
        """Reduce what is left, and drop the gradients of parameters that no process has used."""
        super().reduce_accumulated()
        if self._unused:
            fsdp2_gradients.drop_unused(self._unused)

    def _reduce_pending(self) -> None:
        for model in self._models:
            if isinstance(model, FSDPModule):
                fsdp2_gradients.reduce_gradients(model)

    def _drop_pending(self, wanted: set[int] | None) -> None:
        fsdp2_gradients.drop_gradients(self._units, wanted)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced and unreduced ones."""
        # Unsharded parameters have the unreduced gradient too: by id, so that each is scaled once.
        unreduced = (gradient for _, gradient in fsdp2_gradients.unreduced_gradients(self._units))
        every = [*gradients_of(parameters), *unreduced]
        norms.scale({id(gradient): gradient for gradient in every}.values(), factor)

    def grad_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The total norm of the reduced gradients, over all shards."""
        return norms.total_norm(gradients_of(parameters), norm_type, self.context.process.device)

    # Saving and loading

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state, on the first process of each machine; all participate, others get an empty dict."""
        state = self.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        keep = self.context.process.is_local_main
        # A collective: on every process, before those that drop the result return.
        full = gather_full_state(state, keep)
        return {name: _detached(value) for name, value in full.items()} if keep else {}

    def to_save(self, item: Any) -> Any:
        """The model, or the optimizer with its full state, by names, gathered now by all processes."""
        if isinstance(item, torch.nn.Module):
            return super().to_save(item)
        state = with_names(item.state_dict(), item, map(self.to_save, self._models))
        return FullStateOptimizer(item, gather_full_state(state, self.context.process.is_local_main))

    def to_load(self, item: Any) -> Any:
        """The model or optimizer, to load a full state into."""
        if not isinstance(item, torch.nn.Module):
            return FullStateOptimizer(item)
        inner = self.unwrap_model(item, keep_torch_compile=False)
        return FullStateModel(inner) if self.is_wrapped(inner) else item


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _context_parallel(context: EngineContext, meshes: Meshes) -> ContextParallel | None:
    config = context.parallelism
    if meshes.context is None or config is None or config.cp_handler is None:
        return None
    rotation = config.cp_handler.cp_comm_strategy
    assert rotation is not None, "the environment has a default"
    return ContextParallel(meshes.context, rotation)


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


class SharedMeshes:
    """The mesh objects that are kept: the first of each set of equal ones.

    torch (2.13) creates up to two mesh objects per parameter with replicas or tensor parallelism, and each
    lists all ranks of the world. That takes memory that grows with the world, and every operation compares
    the lists.
    """

    def __init__(self) -> None:
        # torch's meshes are equal where their ranks, axes and device type are.
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def deduplicate_meshes(self, module: FSDPModule) -> None:
        """Replace meshes by known equal ones in the parameters of a module.

        This does not depend on the names of torch's attributes: unknown structures are left alone.
        """
        for parameter in sharded_parameters(module):
            for name, value in vars(parameter).items():
                if isinstance(value, DeviceMesh):
                    setattr(parameter, name, self._shared(value))
                    continue  # not its attribute `mesh`, a tensor of all its ranks that is computed on access
                layout = layout_of(value) if isinstance(value, DTensor) else value
                mesh = getattr(layout, "mesh", None)
                if isinstance(mesh, DeviceMesh) and mesh is not self._shared(mesh):
                    layout.mesh = self._shared(mesh)

    def _shared(self, mesh: DeviceMesh) -> DeviceMesh:
        return self._meshes.setdefault(mesh, mesh)
