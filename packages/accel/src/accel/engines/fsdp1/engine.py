"""Fully sharded data parallelism with torch's FullyShardedDataParallel: FSDP version 1."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

from accel.engines.base.context import EngineContext, PrepareRequest
from accel.engines.base.gradients import gradients_of
from accel.engines.common import norms
from accel.engines.common.checks import check_hooks
from accel.engines.fsdp1 import flat
from accel.engines.fsdp1.flat_parameter_map import (
    FlatParameterMap,
    check_group_units,
    check_no_shared_modules,
    check_saveable,
    check_stateless,
)
from accel.engines.fsdp1.gradient_sync import FlatGradientSync
from accel.engines.fsdp1.optimizer_shards import shard_states
from accel.engines.fsdp1.state import (
    FlatFullStateModel,
    FlatFullStateOptimizer,
    FlatRecord,
    full_weights,
    names_in_groups,
)
from accel.engines.mesh.shard import check_ignored
from accel.engines.mesh.tensor.split import is_split
from accel.engines.sharded.activation_checkpointing import apply_activation_checkpointing
from accel.engines.sharded.engine import (
    ShardedEngine,
    ShardedGradients,
    ShardedLoaders,
    ShardedStates,
    warn_of_upcast,
)
from accel.engines.sharded.groups import aliases
from accel.engines.sharded.initial_weights import WeightSource
from accel_ckpt import file_names
from accel_ckpt.errors import CheckpointError
from accel_ckpt.files import tensors, values
from accel_ckpt.folder.all_ranks import run_on_all_ranks
from accel_ckpt.folder.staging import staged
from accel_state.devices.table import device_spec

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffload

    from accel_state.process.info import ProcessInfo

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class FSDP1Loaders(ShardedLoaders):
    """Every process has its own data, and a shard of the model."""

    engine: FSDP1Engine

    @property
    def mesh(self) -> DeviceMesh:
        """One axis of shards over all processes; for hybrid strategies, machines x processes per machine."""
        return self.engine._mesh


class FSDP1Gradients(ShardedGradients):
    """Gradients of flat parameters, and of others."""

    engine: FSDP1Engine

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward accumulates full gradients instead of reducing them."""
        root = _root(model)
        return contextlib.nullcontext() if root is None else self.engine.gradient_sync.no_sync(root.no_sync())

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced and unreduced ones."""
        # Gradients of parameters inside flat ones are views of the flat gradient: they would be scaled twice.
        groups = flat.group_by_parameter(self.engine._models)
        others = [item for item in parameters if id(item) not in groups]
        norms.scale([*gradients_of(others), *flat.gradients(self.engine._models)], factor)

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor | None:
        """The total norm of the reduced gradients, over all shards."""
        sets = flat.gradient_sets(parameters, self.engine._models)
        return norms.norm_of_sets(sets, norm_type, self.engine.context.process.device)

    def clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """As in all sharding engines; gradients are sharded where parameters are."""
        flat.reshard(self.engine._models)
        return super().clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient shard."""
        flat.reshard(self.engine._models)
        super().clip_value(parameters, clip_value)


class FSDP1States(ShardedStates):
    """Full, sharded or local states, depending on the plugin's state_dict_type."""

    engine: FSDP1Engine

    def state_root(self, model: torch.nn.Module) -> torch.nn.Module:
        """The wrapper, which knows the shards of all parameters."""
        return _root(model) or super().state_root(model)

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state, on the first process of each machine; all participate, others get an empty dict."""
        root = _root(model)
        if root is None:
            return super().state_dict(model, unwrap)
        # One process of each machine: machines may not share a disk.
        keep = self.engine.context.process.is_local_main
        weights = full_weights(root, self.engine._records[root], keep)
        return weights if keep else {}

    def is_shard(self, tensor: torch.Tensor) -> bool:
        """Whether it is a flat parameter, or a view of one."""
        return flat.is_flattened(tensor)

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The model, to load a full state into."""
        root = _root(model)
        return model if root is None else FlatFullStateModel(root, self.engine._records[root])

    def check_save(self, optimizers: Iterable[Any]) -> None:
        """Reject optimizers of which torch cannot save the state; every process calls it."""
        for optimizer in optimizers:
            check_saveable(optimizer, self.engine._models, self.engine.context.process)

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer with its full state, gathered now by all processes."""
        inner, root, names = self.engine._placed(optimizer)
        if root is None:
            return optimizer
        return FlatFullStateOptimizer.gathered(inner, root, names, self.engine.context.process.is_local_main)

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer, to load a full state into."""
        inner, root, names = self.engine._placed(optimizer)
        return optimizer if root is None else FlatFullStateOptimizer(inner, root, names)

    # LOCAL_STATE_DICT: each process reads and writes its own file, which no other process can use.

    @property
    def _is_local(self) -> bool:
        return self.engine.plugin.state_dict_type is StateDictType.LOCAL_STATE_DICT

    def has_native_checkpoint(self, item: Any) -> bool:
        """Whether an object goes into the local file: with LOCAL_STATE_DICT everything sharded."""
        if not self._is_local:
            return False
        return (
            self.engine.is_wrapped(item)
            if isinstance(item, torch.nn.Module)
            else self.engine._root_of(item) is not None
        )

    def save_native(self, folder: Path, **options: Any) -> None:
        """Write this process's own file, with LOCAL_STATE_DICT; there are no options."""
        super().save_native(folder, **options)
        if self._is_local:
            state = {
                "models": [flat.local_state(root) for root in self.engine._records],
                "optimizers": [
                    item.state_dict() for item in self.engine._optimizers if self.has_native_checkpoint(item)
                ],
            }
            with staged(folder, process=self.engine.context.process) as staging:
                name = file_names.local_state_file(self.engine.context.process.rank)
                staging.write(values.encode(state, name), name)

    def check_native(self, names: Collection[str]) -> None:
        """Reject a checkpoint of another engine, or with other shards.

        Raises:
            CheckpointError: If it was not saved with the state_dict_type that is set, or LOCAL_STATE_DICT on
                another number of processes.
        """
        if not self._is_local:
            super().check_native(names)
            return
        saved, size = (
            sum(file_names.role_of(name) == "local" for name in names),
            self.engine.context.process.world_size,
        )
        if saved != size:
            raise CheckpointError(
                f"The checkpoint has local files of {saved} processes, and "
                f"state_dict_type='LOCAL_STATE_DICT' needs one for each of the {size} here. Load it on as "
                "many, or with the type that it was saved with."
            )

    def load_native(self, folder: Path, **options: Any) -> None:
        """Load this process's own file, with LOCAL_STATE_DICT.

        Raises:
            Exception: If it does not fit; CheckpointError if it does not fit on another process.
        """
        if self._is_local:
            run_on_all_ranks(
                lambda: self._load_local(folder), self.engine.context.process, "loading each process's shard"
            )

    def _load_local(self, folder: Path) -> None:
        name = file_names.local_state_file(self.engine.context.process.rank)
        state = values.decode(tensors.load(folder / name, map_location="cpu"))
        # In the order of `prepare`, as in the file.
        optimizers = [item for item in self.engine._optimizers if self.has_native_checkpoint(item)]
        for root, shard in zip(self.engine._records, state["models"], strict=True):
            flat.load_local_state(root, shard)
        for optimizer, shard in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(shard)


class FSDP1Engine(ShardedEngine):
    """Modules in FSDP wrappers: each has one flat parameter, unsharded while the module computes."""

    gradients_type = FSDP1Gradients
    loaders_type = FSDP1Loaders
    states_type = FSDP1States

    name = "fsdp1"

    version = 1

    def __init__(self, context: EngineContext) -> None:
        _check_offload(context.settings.cpu_offload, context.process)
        super().__init__(context)
        self._flat_map = FlatParameterMap()
        self.gradient_sync: FlatGradientSync = FlatGradientSync(self._flat_map, context.process)
        self._mesh = _make_mesh(self.plugin.sharding_strategy, context.process)
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, FlatRecord] = weakref.WeakKeyDictionary()

    def check(self, request: PrepareRequest) -> None:
        """Reject what cannot be sharded, before anything is changed."""
        super().check(request)
        fresh = [
            model for model in request.models if not request.evaluation_mode and not self.is_wrapped(model)
        ]
        taken = flat.flattened_modules(self._models)
        for model in fresh:
            check_no_shared_modules(model, taken)
        units = [set(members) for model in fresh for members in flat.members_of(model, self.groups_of(model))]
        # Also those prepared before: they may have parameters of this model.
        for optimizer in (*request.optimizers, *self._optimizers):
            if not self.plugin.use_orig_params:
                check_stateless(optimizer, fresh)
                check_group_units(optimizer, units)
            self._flat_map.check(optimizer)

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject a model that does not fit the settings; nothing is changed."""
        is_split(model, 1, self.name)
        groups = self.groups_of(model)
        check_ignored(model, groups.ignored, self._mesh.size())
        fix = "Set fsdp_version=2, which keeps those of register_hook; or train under DDP."
        check_hooks(model, self.name, fix)
        upcasts = self.context.precision.is_mixed
        flat.check_flat_groups(model, groups, upcasts, bool(self.plugin.use_orig_params))

    @property
    def sends_weights(self) -> bool:
        """The plugin's sync_module_states."""
        return bool(self.plugin.sync_module_states)

    @property
    def needs_weights(self) -> bool:
        """On the processes that weights come from, unless param_init_fn creates them."""
        return self.plugin.param_init_fn is None and (self.context.process.is_main or not self.sends_weights)

    def is_wrapped(self, model: torch.nn.Module) -> bool:
        """Whether the model is sharded already."""
        return _root(model) is not None

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model; idempotent."""
        if self.is_wrapped(model):
            return model
        groups = self.groups_of(model)
        self.forget_groups(model)
        if self.context.precision.is_mixed:
            warn_of_upcast(model, *flat.upcast_groups(model, groups))
        # Before wrapping: afterwards names have prefixes, and tied weights have one name.
        record, before = FlatRecord.of(model), aliases(model)
        # Checkpointing changes the forward that the wrappers call: parameters are gathered for the
        # second computation too.
        apply_activation_checkpointing(
            groups.checkpointed, bool(self.plugin.activation_checkpointing_offload)
        )
        root = flat.shard_flat(model, groups, self._sharding())
        self._flat_map.record(before, root)
        self._records[root] = record
        self._models[root] = None
        self.gradient_sync.add(root)
        return root

    def _sharding(self) -> flat.FlatSharding:
        plugin, device = self.plugin, self.context.process.device
        device = device_spec(device).with_index(device)  # torch warns of a device without an index
        policy = copy.copy(plugin)  # a copy: the precision is completed for this Accelerator
        if self.context.precision.is_mixed:
            policy.set_mixed_precision(self.context.precision.name)
        options = {
            "sharding_strategy": plugin.sharding_strategy,
            "cpu_offload": plugin.cpu_offload,
            "backward_prefetch": plugin.backward_prefetch,
            "mixed_precision": policy.mixed_precision_policy,
            "forward_prefetch": bool(plugin.forward_prefetch),
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": bool(plugin.use_orig_params),
        }
        source = WeightSource(self._mesh, device, bool(plugin.sync_module_states), plugin.param_init_fn)
        return flat.FlatSharding(source, options)

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of a model that is sharded already."""
        return flat.is_flattened(parameter)

    def swap_parameters(self, optimizer: Any) -> None:
        """Replace the optimizer's parameters by those that models have now, and shard its state."""
        inner = getattr(optimizer, "optimizer", optimizer)
        self._flat_map.swap_parameters(inner)
        shard_states(inner, self._models)

    # Gradients

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, also where parameters were frozen or unfrozen inside a window.

        Raises:
            RuntimeError: If weights are needed that a previous backward pass has freed, or if the pass begins
                at no output that torch has found.
        """
        self.gradient_sync.before_backward()
        try:
            super().backward(loss, **kwargs)
        except ValueError as error:
            if "expected to be in states" not in str(error):
                raise
            raise RuntimeError(
                f"{self.name}: backward began at a tensor that torch did not find in the output of the "
                "model's forward, where it prepares for the backward pass. Call the model itself, and return "
                "tensors, or tuples, lists, dicts or dataclasses of them, not an object of another class; or "
                "train with DDP."
            ) from error
        except RuntimeError as error:
            if "setStorage" not in str(error):
                raise
            raise RuntimeError(
                f"{self.name}: backward needs weights that the backward pass before it has freed. Run each "
                "backward pass right after its forward pass, or add the losses up for one; fsdp_version=2 "
                "takes several forward passes before the first backward pass."
            ) from error

    def _root_of(self, optimizer: Any) -> torch.nn.Module | None:
        """The wrapped model whose parameters an optimizer has."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        roots = (root for root in self._records if ids & {id(item) for item in root.parameters()})
        return next(roots, None)

    def _placed(self, optimizer: Any) -> tuple[Any, torch.nn.Module | None, list[list[str]]]:
        """The unwrapped optimizer, the model whose parameters it has, and their names in each group."""
        inner = getattr(optimizer, "optimizer", optimizer)
        root = self._root_of(inner)
        if root is None:
            return inner, None, []
        names = names_in_groups(inner, root, self._records[root])
        return inner, root, self._flat_map.in_original_order(inner, names)


def _root(model: torch.nn.Module) -> FullyShardedDataParallel | None:
    """The wrapper of a prepared model, below torch.compile's."""
    plain = getattr(model, "_orig_mod", model)
    return plain if isinstance(plain, FullyShardedDataParallel) else None


def _check_offload(offload: CPUOffload, process: ProcessInfo) -> None:
    if offload.offload_params and process.device.type == "cpu":
        raise ValueError(
            "cpu_offload=True with fsdp_version=1 copies shards between an accelerator and the CPU, and this "
            "process computes on the CPU, where they are anyway. Leave cpu_offload out."
        )


def _make_mesh(strategy: ShardingStrategy, process: ProcessInfo) -> DeviceMesh:
    kind, size, local = process.device.type, process.world_size, process.local_world_size
    # A mesh for plain sharding too: weights are broadcast over its groups.
    if strategy not in _HYBRID:
        return init_device_mesh(kind, (size,), mesh_dim_names=("dp_shard",))
    if size % local:
        raise ValueError(
            f"sharding_strategy={strategy.name} makes a shard for each process of a machine and a replica "
            f"for each machine, and {size} processes with {local} on this one are not that. Start as many on "
            "each, or set FULL_SHARD."
        )
    # Shards inside of a machine, where links are fast, and replicas over machines.
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(kind, (size // local, local), mesh_dim_names=names)
