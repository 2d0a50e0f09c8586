"""Parallelism over one device mesh: FSDP2, HSDP, tensor and context parallelism, and their combinations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from accel.engines.base.context import EngineContext, PrepareRequest
from accel.engines.base.gradients import gradients_of
from accel.engines.common import norms
from accel.engines.common.full_state import FullStateModel, FullStateOptimizer, gather_full_state, with_names
from accel.engines.common.swap_parameters import swap_parameters
from accel.engines.mesh import fsdp2_private
from accel.engines.mesh.context.context_parallel import ContextParallel
from accel.engines.mesh.context.language_models import check_language_models, complete_inputs_for
from accel.engines.mesh.gradient_sync import MeshGradientSync
from accel.engines.mesh.plan import Meshes, find_meshes, parallelize, plan_for, sends_weights, weight_source
from accel.engines.mesh.tensor.random_numbers import SharedRandomState
from accel.engines.sharded.engine import ShardedEngine, ShardedGradients, ShardedLoaders, ShardedStates
from accel.engines.sharded.groups import aliases
from accel.engines.torch_private import clear_sharding_cache, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshGradients(ShardedGradients):
    """Gradients sharded over a mesh."""

    engine: MeshEngine

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward accumulates full gradients instead of reducing them."""
        plain = uncompiled(model)
        if not isinstance(plain, FSDPModule):
            return contextlib.nullcontext()
        return self.engine.gradient_sync.no_sync(fsdp2_private.no_sync(plain))

    @property
    def data_parallel_size(self) -> int:
        """Gradients differ between all processes except within a tensor-parallel group."""
        return self.engine.context.process.world_size // self.engine._meshes.tensor_size

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced and unreduced ones."""
        # Unsharded parameters have the unreduced gradient too: by id, so that each is scaled once.
        every = [*gradients_of(parameters), *self.engine.gradient_sync.gradients()]
        norms.scale({id(gradient): gradient for gradient in every}.values(), factor)

    def tensors_with_grad(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The shards of parameters that have no gradients themselves."""
        tensors = super().tensors_with_grad(parameters)
        if not any(item.requires_grad and item.grad is None for item in tensors):
            return tensors
        sync = self.engine.gradient_sync
        return [sync.trained_parameter(item) if item.grad is None else item for item in tensors]

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor | None:
        """The total norm of the reduced gradients, over all shards."""
        gradients = gradients_of(self.tensors_with_grad(parameters))
        return norms.total_norm(gradients, norm_type, self.engine.context.process.device)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient shard."""
        super().clip_value(self.tensors_with_grad(parameters), clip_value)


class MeshLoaders(ShardedLoaders):
    """Data per process; processes that split weights or sequences share it."""

    engine: MeshEngine

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the parallelism configuration; without one, one axis of shards over all processes."""
        mesh = self.engine.context.mesh
        return mesh if mesh is not None else self.engine._meshes.fsdp

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a context-parallel group has its shard of each sequence."""
        sequences = self.engine._sequences
        if sequences is None:
            return super().context_parallel(buffers, dims, no_restore)
        return sequences.shard(buffers, dims, no_restore)


class MeshStates(ShardedStates):
    """Full states, gathered from the shards of a mesh."""

    engine: MeshEngine

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state, on the first process of each machine; all participate, others get an empty dict."""
        state = self.engine.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        keep = self.engine.context.process.is_local_main
        # A collective: on every process, before those that drop the result return.
        full = gather_full_state(state, keep)
        return {name: _detached(value) for name, value in full.items()} if keep else {}

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The model, to load a full state into."""
        inner = self.engine.unwrap_model(model, keep_torch_compile=False)
        return FullStateModel(inner) if self.engine.is_wrapped(inner) else model

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer with its full state, by names, gathered now by all processes."""
        state = with_names(optimizer.state_dict(), optimizer, map(self.state_root, self.engine._models))
        return FullStateOptimizer(
            optimizer, gather_full_state(state, self.engine.context.process.is_local_main)
        )

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer, to load a full state into."""
        return FullStateOptimizer(optimizer)


class MeshEngine(ShardedEngine):
    """Parameters, gradients and optimizer states sharded over the axes of a mesh."""

    gradients_type = MeshGradients
    loaders_type = MeshLoaders
    states_type = MeshStates

    name = "fsdp2"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.gradient_sync: MeshGradientSync = MeshGradientSync(context.process)
        # A previous Accelerator may have had process groups that are gone.
        clear_sharding_cache()
        self._meshes = find_meshes(context)
        self.name = context.name
        self._sequences = _context_parallel(context, self._meshes)

    @property
    def model_parallel_size(self) -> int:
        """Processes that split weights or sequences, and so work on the same samples."""
        return self._meshes.model_parallel_size

    def check(self, request: PrepareRequest) -> None:
        """Reject what cannot be parallelized, before anything is changed."""
        super().check(request)
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
        return self.gradient_sync.is_model_parameter(parameter)

    def swap_parameters(self, optimizer: Any) -> None:
        """Replace the optimizer's parameters by the shards that models have now."""
        swap_parameters(optimizer, self.gradient_sync.trained_parameter)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by fp8 layers, whose weights are gathered in fp8 if they are sharded."""
        if self.context.fp8 is not None and not self.is_wrapped(model):
            before = aliases(model)
            self.context.fp8.convert(model, self._meshes.fsdp is not None and not evaluation_mode)
            self.forget_groups(model)  # their modules may have been replaced
            self.gradient_sync.parameter_map.record(before, model)

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """As in all sharding engines; language models are told which sequence shard they get."""
        model = super().prepare_model(model, place, evaluation_mode)
        if self._sequences is not None:
            complete_inputs_for(model, self._sequences.current)
        return model

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place; idempotent."""
        plain = uncompiled(model)
        if not self.is_wrapped(model):
            chosen = self.groups_of(model)
            self.forget_groups(model)
            plan = plan_for(model, self.plugin, self._meshes, self.context, chosen)
            before = aliases(model)
            model = plain = parallelize(model, plan)
            # Afterwards: the parameters are new, and optimizers may have the previous ones.
            self.gradient_sync.add(plain, before, self.name)
            if isinstance(plain, FSDPModule) and callable(getattr(plain, "generate", None)):
                # transformers' generate() calls submodules directly, without gathering the root's weights.
                register_fsdp_forward_method(plain, "generate")
            if self._meshes.tensor is not None:
                SharedRandomState(self._meshes.tensor.get_group(), self.context.process.device).attach(plain)
        self._models[plain] = None
        return model

    # Gradients

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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _context_parallel(context: EngineContext, meshes: Meshes) -> ContextParallel | None:
    config = context.parallelism
    if meshes.context is None or config is None or config.cp_handler is None:
        return None
    rotation = config.cp_handler.cp_comm_strategy
    assert rotation is not None, "the environment has a default"
    return ContextParallel(meshes.context, rotation)
