"""Fully sharded data parallelism with torch's FullyShardedDataParallel: FSDP version 1."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

from accel.engines.common import norms
from accel.engines.common.checks import check_hooks, warn_of_options
from accel.engines.common.create_graph import reject_create_graph
from accel.engines.common.gradients import gradients_of
from accel.engines.common.layouts import check_ignored, is_split
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.context import DataParallel, EngineCheckpoint, EngineContext, PrepareRequest
from accel.engines.fsdp1 import flat
from accel.engines.fsdp1.flat_parameter_map import (
    FlatParameterMap,
    check_group_units,
    check_no_shared_modules,
    check_saveable,
    check_stateless,
)
from accel.engines.fsdp1.freezing import Freezing, check_hooks_of_shards, drop_stale_hooks
from accel.engines.fsdp1.optimizer_shards import shard_states
from accel.engines.fsdp1.state import (
    FlatFullStateModel,
    FlatFullStateOptimizer,
    FlatRecord,
    full_weights,
    names_in_groups,
)
from accel.engines.fsdp_groups import aliases, apply_activation_checkpointing
from accel.engines.initial_weights import WeightSource
from accel.engines.sharded_engine import ShardedEngine, warn_of_upcast
from accel.engines.torch_private import uncompiled
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


class LocalCheckpoint:
    """LOCAL_STATE_DICT: each process reads and writes its own file, which no other process can use.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: FSDP1Engine) -> None:
        self._engine = engine
        self._process = engine.context.process

    def has(self, item: Any) -> bool:
        """Whether an object goes into the local file: everything sharded."""
        if isinstance(item, torch.nn.Module):
            return self._engine.is_wrapped(item)
        return self._engine._root_of(item) is not None

    def save(self, folder: Path, **options: Any) -> None:
        """Write this process's own file; there are no options."""
        warn_of_options(self._engine.name, options)
        state = {
            "models": [flat.local_state(root) for root in self._engine._records],
            "optimizers": [item.state_dict() for item in self._engine._optimizers if self.has(item)],
        }
        with staged(folder, process=self._process) as staging:
            name = file_names.local_state_file(self._process.rank)
            staging.write(values.encode(state, name), name)

    def check(self, names: Collection[str]) -> None:
        """Reject a checkpoint with other shards.

        Raises:
            CheckpointError: If it was not saved with LOCAL_STATE_DICT on as many processes.
        """
        saved, size = (
            sum(file_names.role_of(name) == "local" for name in names),
            self._process.world_size,
        )
        if saved != size:
            raise CheckpointError(
                f"The checkpoint has local files of {saved} processes, and "
                f"state_dict_type='LOCAL_STATE_DICT' needs one for each of the {size} here. Load it on as "
                "many, or with the type that it was saved with."
            )

    def load(self, folder: Path, **options: Any) -> None:
        """Load this process's own file.

        Raises:
            Exception: If it does not fit; CheckpointError if it does not fit on another process.
        """
        run_on_all_ranks(lambda: self._load(folder), self._process, "loading each process's shard")

    def _load(self, folder: Path) -> None:
        name = file_names.local_state_file(self._process.rank)
        state = values.decode(tensors.load(folder / name, map_location="cpu"))
        # In the order of `prepare`, as in the file.
        optimizers = [item for item in self._engine._optimizers if self.has(item)]
        for root, shard in zip(self._engine._records, state["models"], strict=True):
            flat.load_local_state(root, shard)
        for optimizer, shard in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(shard)


class FSDP1Engine(ShardedEngine):
    """Modules in FSDP wrappers: each has one flat parameter, unsharded while the module computes."""

    name = "fsdp1"
    version = 1
    parameters: FlatParameterMap
    traits = replace(ShardedEngine.traits, unsupported_optimizers=("LBFGS", "Adafactor", "Muon"))

    def __init__(self, context: EngineContext) -> None:
        _check_offload(context.settings.cpu_offload, context.process)
        super().__init__(context)
        self._freezing = Freezing()
        # One axis of shards over all processes; for hybrid strategies, machines x processes per machine.
        self._mesh = _make_mesh(self.plugin.sharding_strategy, context.process)
        self.data_parallel = DataParallel(context.process.rank, context.process.world_size, self._mesh)
        self._records: weakref.WeakKeyDictionary[torch.nn.Module, FlatRecord] = weakref.WeakKeyDictionary()

    def _make_parameters(self, send: Callable[[Sequence[torch.Tensor]], None] | None) -> FlatParameterMap:
        models = self._models
        return FlatParameterMap(send, reshard=lambda: flat.reshard(models))

    def _check_locally(self, request: PrepareRequest) -> None:
        super()._check_locally(request)
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
            self.parameters.check(optimizer)

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

    def setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
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
        self._records[root] = record
        self._models[root] = None
        self.parameters.record_model(before, flat.owners_by_name(root))
        self.parameters.add_model(root)
        # Once, and not in each forward pass.
        handles = [handle for _, handle in flat.fsdp_units([root])]
        root.register_forward_pre_hook(partial(check_hooks_of_shards, handles))
        root.register_forward_pre_hook(partial(drop_stale_hooks, handles))
        reject_create_graph([root], self.name)
        check_same_order(root, flat.units_by_name(root), self.context.process, self.name, FSDP_FIX)
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
        self.parameters.swap_parameters(inner)
        shard_states(inner, self._models)

    # In a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, also where parameters were frozen or unfrozen inside a window.

        Raises:
            RuntimeError: If weights are needed that a previous backward pass has freed, or if the pass begins
                at no output that torch has found.
        """
        # Outside of a window torch reduces at once, and there is nothing to lose.
        if self._has_unreduced:
            self._freezing.follow(self._models)
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

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward accumulates full gradients instead of reducing them."""
        root = _root(model)
        return contextlib.nullcontext() if root is None else self._no_sync(root.no_sync())

    def _reduce_pending(self) -> None:
        """Reduce the unreduced gradients.

        Raises:
            ValueError: If some belong to parameters that are frozen now; nothing is reduced.
        """
        self._freezing.finish(self._models)
        flat.reduce_gradients(self._models)

    def _drop_pending(self, wanted: set[int] | None) -> None:
        flat.drop_gradients(self._models, wanted)

    def clip_gradients(self, parameters: Sequence[torch.Tensor], **options: Any) -> torch.Tensor | None:
        """As in all sharding engines; gradients are sharded where parameters are."""
        self.parameters.reshard()
        return super().clip_gradients(parameters, **options)

    def scale_gradients(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced and unreduced ones."""
        # Gradients of parameters inside flat ones are views of the flat gradient: they would be scaled twice.
        groups = flat.group_by_parameter(self._models)
        others = [item for item in parameters if id(item) not in groups]
        norms.scale([*gradients_of(others), *flat.gradients(self._models)], factor)

    def grad_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The total norm of the reduced gradients, over all shards."""
        sets = flat.gradient_sets(parameters, self._models)
        return norms.norm_of_sets(sets, norm_type, self.context.process.device)

    # Saving and loading

    @property
    def checkpoint(self) -> EngineCheckpoint:
        """As in all sharding engines; with LOCAL_STATE_DICT this process's own file."""
        is_local = self.plugin.state_dict_type is StateDictType.LOCAL_STATE_DICT
        native = LocalCheckpoint(self) if is_local else None
        return replace(super().checkpoint, native=native, check=self._check_save)

    def _check_save(self, optimizers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            check_saveable(optimizer, self._models, self.context.process)

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state, on the first process of each machine; all participate, others get an empty dict."""
        root = _root(model)
        if root is None:
            return super().state_dict(model, unwrap)
        # One process of each machine: machines may not share a disk.
        keep = self.context.process.is_local_main
        weights = full_weights(root, self._records[root], keep)
        return weights if keep else {}

    def to_save(self, item: Any) -> Any:
        """The wrapper of a model, or an optimizer with its full state, gathered now by all processes."""
        if isinstance(item, torch.nn.Module):
            return _root(item) or super().to_save(item)  # the wrapper knows the shards of all parameters
        inner, root, names = self._placed(item)
        if root is None:
            return item
        return FlatFullStateOptimizer.gathered(inner, root, names, self.context.process.is_local_main)

    def to_load(self, item: Any) -> Any:
        """The model or optimizer, to load a full state into."""
        if isinstance(item, torch.nn.Module):
            wrapper = _root(item)
            return item if wrapper is None else FlatFullStateModel(wrapper, self._records[wrapper])
        inner, root, names = self._placed(item)
        return item if root is None else FlatFullStateOptimizer(inner, root, names)

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
        return inner, root, self.parameters.in_original_order(inner, names)


def _root(model: torch.nn.Module) -> FullyShardedDataParallel | None:
    """The wrapper of a prepared model, below torch.compile's."""
    plain = uncompiled(model)
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
