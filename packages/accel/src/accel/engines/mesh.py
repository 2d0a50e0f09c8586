"""Parallelism over one device mesh: FSDP2 and HSDP.

How a model becomes parallel is the function `parallelize`, read from top to bottom.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, StateDictType

from accel.engines.base import Engine, EngineContext, Prepared
from accel.parallel import held_back, norms
from accel.parallel.checkpointing import apply_activation_checkpointing
from accel.parallel.full_state import WholeModel, WholeOptimizer, gather_whole
from accel.parallel.repoint import Replaced, repoint
from accel.parallel.sharding import Sharding, check_dtypes, check_ignored, check_weights, shard, upcast
from accel.parallel.wrapping import aliases, ignored_parameters, modules_to_shard
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_ops import collectives
from accel_state import rendezvous
from accel_state.devices import row
from accel_state.env import CPUInformation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.parallelism import ParallelismConfig
    from accel_state.process import Process

__all__ = ["MeshEngine", "Plan", "parallelize", "plan_for"]


@dataclass(frozen=True)
class Plan:
    """What is done to one model.

    Attributes:
        sharding: How it is sharded.
        groups: The modules that are sharded by themselves, inner ones first.
        ignored: The parameters that are left whole.
        checkpointed: The modules that compute their activations again in backward.
        offload_activations: Whether what these keep rests on the CPU.
        upcasts: Whether trainable parameters are kept in float32.
    """

    sharding: Sharding
    groups: tuple[torch.nn.Module, ...]
    ignored: set[torch.nn.Parameter]
    checkpointed: tuple[torch.nn.Module, ...]
    offload_activations: bool
    upcasts: bool


def parallelize(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Make a model parallel; the order matters."""
    if plan.upcasts:
        _tell_upcast(model, upcast(model, plan.ignored))
    # Checkpointing changes the forward that the sharding's hooks go around: parameters are gathered once for
    # the second computation too.
    apply_activation_checkpointing(plan.checkpointed, plan.offload_activations)
    return shard(model, plan.groups, plan.ignored, plan.sharding)


def plan_for(
    model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin, mesh: DeviceMesh, context: EngineContext
) -> Plan:
    """Decide what is done to a model, and refuse what cannot be done; nothing is changed.

    Raises:
        ValueError: If the model and the settings do not fit; the message names the fix.
    """
    policy = replace(plugin)  # its own, as the policy is completed for this model
    policy.set_auto_wrap_policy(model)
    ignored = ignored_parameters(model, plugin.ignored_modules)
    groups = tuple(modules_to_shard(model, policy.auto_wrap_policy, ignored))
    if plugin.activation_checkpointing and not groups:
        raise ValueError(
            f"activation_checkpointing recomputes the modules that auto_wrap_policy chooses, and it chooses "
            f"none of {type(model).__name__}. Set auto_wrap_policy='transformer_based_wrap' (or "
            "'size_based_wrap' with min_num_params)."
        )
    process, is_mixed = context.process, context.precision.is_mixed
    size = mesh.size()
    is_source = not any(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
    sync = plugin.sync_module_states is not False or bool(plugin.cpu_ram_efficient_loading)
    check_weights(model, is_source, sync)
    check_ignored(model, ignored, size)
    check_dtypes(model, groups, is_mixed)
    policy.set_mixed_precision(context.precision.name)
    sharding = Sharding(
        mesh=mesh,
        device=process.device,
        reshard_after_forward=plugin.reshard_after_forward,
        precision=policy.mixed_precision_policy,
        offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        sync=sync,
    )
    checkpointed = groups if plugin.activation_checkpointing else ()
    offloads = bool(plugin.activation_checkpointing_offload)
    return Plan(sharding, groups, ignored, checkpointed, offloads, is_mixed)


class MeshEngine(Engine):
    """Parameters, gradients and optimizer states in shards over the axes of a mesh."""

    name = "fsdp2"

    keeps_open_window = False

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.plugin = context.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
        _ensure_group(context.process)
        self._mesh = _fsdp_mesh(context.mesh, context.parallelism, context.process)
        self._replaced = Replaced()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the parallelism configuration; without one, all processes in a row of shards."""
        return self.context.mesh if self.context.mesh is not None else self._mesh

    @property
    def data_shard(self) -> tuple[int, int]:
        """Every process has its own share of the data."""
        return self.context.process.rank, self.context.process.world_size

    def check(self, objects: Prepared) -> None:
        """Refuse what cannot be sharded, before anything is changed."""
        super().check(objects)
        if self.context.scaler is not None:
            raise ValueError(
                "mixed_precision='fp16' with fsdp_version=2 is not there yet: the processes would have to "
                "agree on skipped steps. Use mixed_precision='bf16', or fsdp_version=1."
            )
        for model in objects.models:
            devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
            if len(devices) > 1:
                raise ValueError(
                    f"{type(model).__name__} is spread over {sorted(devices)} (hf_device_map), and FSDP "
                    "places parameters by itself. Load it without device_map."
                )
            if not objects.evaluation_mode and not _is_sharded(model):
                plan_for(model, self.plugin, self._mesh, self.context)

    def prepare(self, objects: Prepared) -> Prepared:
        """Shard models, and point all optimizers to the new parameters, whichever was prepared first."""
        done = super().prepare(objects)
        for optimizer in self._known:
            repoint(optimizer, self._replaced)
        return done

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """As the base engine does; sharding places parameters by itself, group by group."""
        return super().prepare_model(model, place and evaluation_mode, evaluation_mode)

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place; twice is once."""
        if _is_sharded(model):
            return model
        plan = plan_for(model, self.plugin, self._mesh, self.context)
        before = aliases(model)
        model = parallelize(model, plan)
        self._replaced.note(before, model)
        self._models.add(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Point an optimizer to the parameters that its model has now, and wrap it."""
        repoint(optimizer, self._replaced)
        prepared = super().prepare_optimizer(optimizer, place)
        self._known.add(prepared)
        return prepared

    # Gradients

    @property
    def holds_gradients_back(self) -> bool:
        """Gradients of a window are kept whole on their process, and reduced at its end."""
        return True

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward keeps whole gradients instead of reducing them."""
        sharded = _sharded(model)
        return contextlib.nullcontext() if sharded is None else held_back.holding(sharded)

    def total_weight(self, weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        """Add up a weight over the processes that have data of their own."""
        process = self.context.process
        if not isinstance(weight, torch.Tensor):
            weight = torch.full((), weight, dtype=dtype, device=process.device)
        total = collectives.reduce(weight.to(process.device, dtype), "sum", process=process)
        return total if total.device.type != "cpu" else float(total)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced ones and those that are held back."""
        # Parameters that are gathered right now show the gradient that is held back: each is scaled once.
        every = [*norms.gradients_of(parameters), *held_back.gradients(self._models)]
        norms.scale({id(gradient): gradient for gradient in every}.values(), factor)

    def grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """The total norm of the reduced gradients, over all shards."""
        return norms.total_norm(norms.gradients_of(parameters), norm_type, self.context.process.device)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm over all shards; returns the norm before clipping."""
        gradients = norms.gradients_of(parameters)
        norm = norms.total_norm(gradients, norm_type, self.context.process.device)
        norms.scale(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    # States

    @property
    def saves_parts(self) -> bool:
        """Whether the plugin's state_dict_type is SHARDED_STATE_DICT."""
        return self.plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state, on the first process of each machine; others take part and get an empty dict."""
        state = self.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        keep = self.context.process.is_local_main
        whole = gather_whole(state, keep)
        return {name: _detached(value) for name, value in whole.items()} if keep else {}

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The model as a whole state is loaded into it."""
        inner = self.unwrap_model(model, keep_torch_compile=False)
        return WholeModel(inner) if _is_sharded(inner) else model

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


def _is_sharded(model: torch.nn.Module) -> bool:
    return _sharded(model) is not None


def _ensure_group(process: Process) -> None:
    """Make a group of one process where none was launched: FSDP asked for is FSDP."""
    if process.world_size == 1 and not rendezvous.has_group():
        alone = CPUInformation(0, 1, 0, 1)
        store = dist.HashStore()  # type: ignore[attr-defined]
        rendezvous.start(row(process.device), alone, process.device, {"store": store})


def _fsdp_mesh(mesh: DeviceMesh | None, config: ParallelismConfig | None, process: Process) -> DeviceMesh:
    """The axes that models are sharded and replicated over."""
    if mesh is not None and config is not None and config.dp_shard_enabled:
        return config.get_submesh(config.fsdp_dim_names)
    kind, size = process.device.type, process.world_size
    if mesh is None:
        return init_device_mesh(kind, (size,), mesh_dim_names=("dp_shard",))
    # Replicas alone: each is one shard.
    return init_device_mesh(kind, (size, 1), mesh_dim_names=("dp_replicate", "dp_shard"))


def _tell_upcast(model: torch.nn.Module, names: list[str]) -> None:
    if names:
        warnings.warn(
            f"Mixed precision keeps trainable parameters in float32: {len(names)} of {type(model).__name__} "
            f"became float32 ({names[0]} and others).",
            stacklevel=2,
        )
