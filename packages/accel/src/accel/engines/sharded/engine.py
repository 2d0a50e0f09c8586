"""The base of engines that shard models: both versions of FSDP, and the mesh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from accel.engines.base import Engine, Gradients, Loaders, States
from accel.engines.base.context import EngineContext, PrepareRequest
from accel.engines.base.gradients import gradients_of
from accel.engines.common import norms
from accel.engines.common.check_on_all_ranks import check_on_all_ranks
from accel.engines.common.checks import mapped_devices
from accel.engines.common.single_process_group import ensure_process_group
from accel.engines.common.standalone import parameters_of
from accel.engines.mesh.shard import check_layout, check_sparse, check_unshared
from accel.engines.sharded.groups import Groups, choose_groups
from accel.engines.sharded.plugin import FullyShardedDataParallelPlugin
from accel_state.logging.warning import warn


class ShardedStates(States):
    """Sharded models and optimizers."""

    engine: ShardedEngine

    can_save_mid_window = False

    @property
    def saves_sharded(self) -> bool:
        """Whether the plugin's state_dict_type is SHARDED_STATE_DICT."""
        return self.engine.plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT

    @property
    def gathers_full_state(self) -> bool:
        """Whether the plugin's state_dict_type is FULL_STATE_DICT."""
        return self.engine.plugin.state_dict_type is StateDictType.FULL_STATE_DICT


class ShardedLoaders(Loaders):
    """Data per data-parallel rank; model-parallel processes share it."""

    engine: ShardedEngine

    @property
    def dp_rank_and_size(self) -> tuple[int, int]:
        """Every process has its own data, except that model-parallel processes have the same."""
        process = self.engine.context.process
        return (
            process.rank // self.engine.model_parallel_size,
            process.world_size // self.engine.model_parallel_size,
        )


class ShardedGradients(Gradients):
    """Sharded gradients; inside a window they stay full on each process, unreduced."""

    engine: ShardedEngine

    are_sharded = True
    reduces_in_backward = True

    @property
    def unsupported_optimizers(self) -> tuple[str, ...]:
        """Optimizers that need full tensors, or shapes, which parameters lack under version 1."""
        # Rprop chooses elements by a mask, which torch supports only for plain tensors.
        return ("LBFGS", "Adafactor", "Rprop" if self.engine.version == 2 else "Muon")

    def clip_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm over all shards; returns the norm before clipping."""
        tensors = self.tensors_with_grad(parameters)
        norm = self.norm(tensors, norm_type)
        assert norm is not None, "engines that shard know it before the step"
        # As torch.nn.utils.clip_grads_with_norm_, which takes no shards on several meshes at once.
        norms.scale(gradients_of(tensors), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def clip_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient; no operation of torch takes DTensors and plain tensors together."""
        for is_sharded in (False, True):
            chosen = [item for item in parameters if isinstance(item.grad, DTensor) is is_sharded]
            super().clip_value(chosen, clip_value)


class ShardedEngine(Engine):
    """Sharded parameters, gradients and optimizer states; optimizers get the sharded parameters."""

    states_type = ShardedStates
    loaders_type = ShardedLoaders
    gradients_type = ShardedGradients

    version = 2

    takes_gradient = True

    ignored_handlers: ClassVar = {
        "ddp": "gradients are reduced without DistributedDataParallel, whose options can be left out"
    }

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.plugin = context.settings or FullyShardedDataParallelPlugin(fsdp_version=self.version)
        ensure_process_group(context.process)
        self._optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # in order
        # Ordered too: collectives over them need the same order on all processes.
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        # Checks and sharding need the same choice, which walks all modules: made once.
        self._groups: dict[torch.nn.Module, Groups] = {}  # during one call of prepare

    @property
    def model_parallel_size(self) -> int:
        """Processes that work on the same samples."""
        return 1

    def check(self, request: PrepareRequest) -> None:
        """Reject what cannot be sharded, before anything is changed."""
        for model in request.models:
            devices = mapped_devices(model)
            if len(devices) > 1:
                raise ValueError(
                    f"{type(model).__name__} is spread over {sorted(devices)} (hf_device_map), and FSDP "
                    "places parameters by itself. Load it without device_map."
                )
        super().check(request)
        models = () if request.evaluation_mode else request.models
        fresh = [model for model in dict.fromkeys(models) if not self.is_wrapped(model)]
        # Before the other checks, whose messages would describe sharded parameters.
        check_unshared(fresh, self.name, self.is_sharded)
        for model in fresh:
            self.check_model(model)
            if self.name != "tp":  # tensor parallelism alone shards nothing outside of its plan
                ignored = self.groups_of(model).ignored
                check_layout(model, self.name, ignored, strided=self.version == 1)
                check_sparse(model, self.name, ignored)

    def check_collectively(self, request: PrepareRequest) -> None:
        """Reject on all ranks what one rejects, and models without weights where these are needed."""
        self.gradient_sync.reshard()  # modules that a second model shares are recognized by their shards
        models = () if request.evaluation_mode else request.models
        fresh = [(model, self.needs_weights) for model in models if not self.is_wrapped(model)]
        source = "the first" if self.sends_weights else "all"
        self.forget_groups()
        try:
            with check_on_all_ranks(fresh, source, self.context.process):
                self.check(request)
        except BaseException:
            self.forget_groups()  # the model may be changed before it is prepared again
            raise

    def groups_of(self, model: torch.nn.Module) -> Groups:
        """The modules of a model that are sharded separately: chosen once per call of prepare.

        Raises:
            ValueError: As `choose_groups`.
        """
        if model not in self._groups:
            self._groups[model] = choose_groups(model, self.plugin)
        return self._groups[model]

    def forget_groups(self, model: torch.nn.Module | None = None) -> None:
        """Forget the chosen groups of a model, or of all: it may have changed."""
        if model is None:
            self._groups.clear()
        else:
            self._groups.pop(model, None)

    @property
    def sends_weights(self) -> bool:
        """Whether all processes get the first process's weights, and do not use their own."""
        raise NotImplementedError

    @property
    def needs_weights(self) -> bool:
        """Whether models need weights on this process."""
        raise NotImplementedError

    def check_model(self, model: torch.nn.Module) -> None:
        """Reject a model that cannot be sharded; nothing is changed.

        Raises:
            ValueError: With the reason and the alternative.
        """
        raise NotImplementedError

    def is_wrapped(self, model: torch.nn.Module) -> bool:
        """Whether the model is sharded already."""
        raise NotImplementedError

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter belongs to a model that is sharded already."""
        raise NotImplementedError

    def swap_parameters(self, optimizer: Any) -> None:
        """Replace the optimizer's parameters by those that models have now."""
        raise NotImplementedError

    def prepare(self, request: PrepareRequest) -> PrepareRequest:
        """Shard models, and give all optimizers the new parameters, in any order of preparing."""
        try:
            done = super().prepare(request)
        finally:
            self.forget_groups()
        # Also those of previous calls: their model may be prepared only now.
        for optimizer in self._optimizers:
            self.swap_parameters(optimizer)
        self.gradient_sync.register(parameters_of(self._optimizers))
        return done

    def convert_model(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        """Replace layers by fp8 layers, which changes the modules of groups."""
        super().convert_model(model, evaluation_mode)
        if self.context.fp8 is not None:
            self.forget_groups(model)

    def prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        """As the base engine; sharding places parameters itself, group by group."""
        return super().prepare_model(model, place and evaluation_mode, evaluation_mode)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Give an optimizer the parameters that its model has now, and wrap it."""
        self.swap_parameters(optimizer)
        prepared = super().prepare_optimizer(optimizer, place)
        self._optimizers[prepared] = None
        return prepared


def warn_of_upcast(model: torch.nn.Module, trained: Sequence[str], frozen: Sequence[str] = ()) -> None:
    """Warn of parameters that were upcast to float32.

    Args:
        model: The model.
        trained: Names of trainable ones.
        frozen: Names of frozen ones that were upcast with them.
    """
    if trained:
        others = f", and with them {len(frozen)} frozen ones of the same groups" if frozen else ""
        warn(
            f"Mixed precision keeps trainable parameters in float32: {len(trained)} of "
            f"{type(model).__name__} became float32 ({trained[0]} and others){others}.",
        )
