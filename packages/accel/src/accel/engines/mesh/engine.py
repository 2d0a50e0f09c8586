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
from accel.engines.mesh.tensor.random_numbers import SharedDraws
from accel.engines.mesh.tensor.split import forget_meshes
from accel.engines.sharded.engine import ShardedEngine, ShardedGradients, ShardedLoaders, ShardedStates
from accel.engines.sharded.groups import aliases

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MeshGradients(ShardedGradients):
    """Gradients in shards over a mesh."""

    engine: MeshEngine

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context whose backward keeps whole gradients instead of reducing them."""
        plain = getattr(model, "_orig_mod", model)
        if not isinstance(plain, FSDPModule):
            return contextlib.nullcontext()
        return self.engine.gradient_sync.no_sync(fsdp2_private.no_sync(plain))

    @property
    def data_parallel_size(self) -> int:
        """All processes but those of one tensor-parallel group have gradients of their own."""
        return self.engine.context.process.world_size // self.engine._meshes.tensor_size

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply the gradients of this window, reduced ones and those that are held back."""
        # Parameters that are gathered right now show the gradient that is held back: each is scaled once.
        every = [*gradients_of(parameters), *self.engine.gradient_sync.gradients()]
        norms.scale({id(gradient): gradient for gradient in every}.values(), factor)

    def tensors_with_grad(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The shards of parameters that have no gradients themselves."""
        given = super().tensors_with_grad(parameters)
        if not any(item.requires_grad and item.grad is None for item in given):
            return given
        return [
            self.engine.gradient_sync.trained_parameter(item) if item.grad is None else item for item in given
        ]

    def norm(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor | None:
        """The total norm of the reduced gradients, over all shards."""
        gradients = gradients_of(self.tensors_with_grad(parameters))
        return norms.total_norm(gradients, norm_type, self.engine.context.process.device)

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient, in shards."""
        super().clip_value(self.tensors_with_grad(parameters), clip_value)


class MeshLoaders(ShardedLoaders):
    """Data for each process, but for groups that split weights or sequences."""

    engine: MeshEngine

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the parallelism configuration; without one, all processes in a row of shards."""
        given = self.engine.context.mesh
        return given if given is not None else self.engine._meshes.fsdp

    def context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None,
        dims: Sequence[int] | None,
        no_restore: AbstractSet[torch.Tensor] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which each process of a context-parallel group has its part of sequences."""
        sequences = self.engine._sequences
        if sequences is None:
            return super().context_parallel(buffers, dims, no_restore)
        return sequences.sharing(buffers, dims, no_restore)


class MeshStates(ShardedStates):
    """Whole states, gathered from the shards of a mesh."""

    engine: MeshEngine

    def state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state, on the first process of each machine; others take part and get an empty dict."""
        state = self.engine.unwrap_model(model, keep_torch_compile=False).state_dict(keep_vars=True)
        keep = self.engine.context.process.is_local_main
        # A collective: on every process, before those that drop the result return.
        whole = gather_full_state(state, keep)
        return {name: _detached(value) for name, value in whole.items()} if keep else {}

    def model_to_load(self, model: torch.nn.Module) -> Any:
        """The model as a whole state is loaded into it."""
        inner = self.engine.unwrap_model(model, keep_torch_compile=False)
        return FullStateModel(inner) if self.engine.is_wrapped(inner) else model

    def optimizer_to_save(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer with its whole state, by names, which is gathered now, by all processes."""
        state = with_names(optimizer.state_dict(), optimizer, map(self.state_root, self.engine._models))
        return FullStateOptimizer(
            optimizer, gather_full_state(state, self.engine.context.process.is_local_main)
        )

    def optimizer_to_load(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as a whole state is loaded into it."""
        return FullStateOptimizer(optimizer)


class MeshEngine(ShardedEngine):
    """Parameters, gradients and optimizer states in shards over the axes of a mesh."""

    gradients_type = MeshGradients
    loaders_type = MeshLoaders
    states_type = MeshStates

    name = "fsdp2"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.gradient_sync: MeshGradientSync = MeshGradientSync(context.process)
        # An Accelerator before this one may have had process groups that are gone.
        forget_meshes()
        self._meshes = find_meshes(context)
        # Replicas that nobody asked to shard are DDP to the user, whatever does it.
        data = "ddp" if self._meshes.has_one_shard and context.settings is None else "fsdp2"
        axes = {data: self._meshes.fsdp, "cp": self._meshes.context, "tp": self._meshes.tensor}
        self.name = " x ".join(name for name, axis in axes.items() if axis is not None)
        self._sequences = _share_sequences(context, self._meshes)

    @property
    def model_parallel_size(self) -> int:
        """The processes of a group that splits weights or sequences work on the same samples."""
        return self._meshes.model_parallel_size

    def check(self, request: PrepareRequest) -> None:
        """Reject what cannot be made parallel, before anything is changed."""
        super().check(request)
        if self._sequences is not None:
            for model in request.models:
                check_language_models(model)

    @property
    def sends_weights(self) -> bool:
        """As the plugin's sync_module_states says."""
        return sends_weights(self.plugin)

    @property
    def needs_weights(self) -> bool:
        """Where weights come from: on the first process of each group that gets them from one."""
        sync = self.sends_weights
        # Weights are passed on axis by axis, from the first process of each group.
        groups = weight_source(self._meshes, self.context.process.device, sync).groups
        return not sync or all(dist.get_rank(group) == 0 for group in groups)

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject a model that does not fit the settings; nothing is changed."""
        plan_for(model, self.plugin, self._meshes, self.context, self.groups_of(model))

    def is_wrapped(self, model: torch.nn.Module) -> bool:
        """Whether the model is sharded already."""
        plain = getattr(model, "_orig_mod", model)
        return isinstance(plain, FSDPModule) or plain in self._models

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of a model that is sharded already."""
        return self.gradient_sync.is_model_parameter(parameter)

    def swap_parameters(self, optimizer: Any) -> None:
        """Give an optimizer the parameters that models have now, in shards."""
        swap_parameters(optimizer, self.gradient_sync.trained_parameter)

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by those of fp8, whose weights are gathered in fp8 where they are sharded."""
        if self.context.fp8 is not None and not self.is_wrapped(model):
            before = aliases(model)
            self.context.fp8.convert(model, self._meshes.fsdp is not None and not evaluation_mode)
            self.forget_groups(model)  # they may have modules that were replaced
            self.gradient_sync.parameter_map.record(before, model)

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """As for all sharded engines; language models learn which part of each sequence they see."""
        model = super().prepare_model(model, place, evaluation_mode)
        if self._sequences is not None:
            complete_inputs_for(model, self._sequences.present)
        return model

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place; idempotent."""
        plain = getattr(model, "_orig_mod", model)
        if not self.is_wrapped(model):
            chosen = self.groups_of(model)
            self.forget_groups(model)
            plan = plan_for(model, self.plugin, self._meshes, self.context, chosen)
            before = aliases(model)
            model = plain = parallelize(model, plan)
            # After all of it: parameters are others now, and those of before may be in optimizers.
            self.gradient_sync.add(plain, before, self.name)
            if isinstance(plain, FSDPModule) and callable(getattr(plain, "generate", None)):
                # In it models of transformers call parts of themselves, which gather no outer weights.
                register_fsdp_forward_method(plain, "generate")
            if self._meshes.tensor is not None:
                SharedDraws(self._meshes.tensor.get_group(), self.context.process.device).attach(plain)
        self._models[plain] = None
        return model

    # Gradients

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, while sequences are shared that were shared in forward.

        Raises:
            RuntimeError: If the loss has a penalty on weights that mixes DTensors with whole tensors.
        """
        if self._sequences is not None:
            self._sequences.check_backward()
        try:
            super().backward(loss, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise RuntimeError(
                f"{error} Under {self.name} parameters are DTensors, in parts, but for those that are "
                "gathered between forward and backward. In a penalty on weights write whole ones: "
                "sum((p.full_tensor() if isinstance(p, DTensor) else p).square().sum() for p in "
                "model.parameters()); or set the optimizer's weight_decay."
            ) from error


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _share_sequences(context: EngineContext, meshes: Meshes) -> ContextParallel | None:
    config = context.parallelism
    if meshes.context is None or config is None or config.cp_handler is None:
        return None
    rotation = config.cp_handler.cp_comm_strategy
    assert rotation is not None, "the environment has a default"
    return ContextParallel(meshes.context, rotation)
