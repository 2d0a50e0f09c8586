"""The base of engines that shard models: both versions of FSDP, and the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import StateDictType

from accel.engines.common import norms
from accel.engines.common.check_on_all_ranks import check_on_all_ranks
from accel.engines.common.checks import mapped_devices
from accel.engines.common.gradients import gradients_of, tensors_with_grad
from accel.engines.common.layouts import check_layout, check_sparse, check_unshared
from accel.engines.common.single_process_group import ensure_process_group
from accel.engines.context import EngineCheckpoint, EngineContext, EngineTraits, PrepareRequest
from accel.engines.distributed import DistributedEngine
from accel.engines.fsdp_groups import Groups, choose_groups
from accel.engines.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_state.logging.warning import warn


class ShardedEngine(DistributedEngine):
    """Sharded parameters, gradients and optimizer states; optimizers get the sharded parameters.

    Inside an accumulation window gradients stay full on each process, unreduced.
    """

    version = 2

    traits = EngineTraits(
        takes_gradient=True,
        reduces_in_backward=True,
        shards_gradients=True,
        # Rprop chooses elements by a mask, which torch supports only for plain tensors.
        unsupported_optimizers=("LBFGS", "Adafactor", "Rprop"),
        can_save_mid_window=False,
        saves_collectively=True,
        ignored_handlers={
            "ddp": "gradients are reduced without DistributedDataParallel, whose options can be left out"
        },
    )

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.plugin = context.settings or FullyShardedDataParallelPlugin(fsdp_version=self.version)
        ensure_process_group(context.process)
        self._has_unreduced = False  # gradients outside of `.grad`
        # Checks and sharding need the same choice, which walks all modules: made once.
        self._groups: dict[torch.nn.Module, Groups] = {}  # during one call of prepare

    def check(self, request: PrepareRequest) -> None:
        """Reject on all ranks what one rejects, and models without weights where these are needed."""
        self.parameters.reshard()  # modules that a second model shares are recognized by their shards
        models = () if request.evaluation_mode else request.models
        fresh = [(model, self.needs_weights) for model in models if not self.is_wrapped(model)]
        source = "the first" if self.sends_weights else "all"
        self.forget_groups()
        try:
            with check_on_all_ranks(fresh, source, self.context.process):
                self._check_locally(request)
        except BaseException:
            self.forget_groups()  # the model may be changed before it is prepared again
            raise

    def _check_locally(self, request: PrepareRequest) -> None:
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
            return super().prepare(request)
        finally:
            self.forget_groups()

    def _register_optimizers(self) -> None:
        # Also those of previous calls: their model may be prepared only now.
        for optimizer in self._optimizers:
            self.swap_parameters(optimizer)
        super()._register_optimizers()

    def _convert_to_fp8(self, model: torch.nn.Module, evaluation_mode: bool) -> None:
        super()._convert_to_fp8(model, evaluation_mode)
        if self.context.fp8 is not None:
            self.forget_groups(model)  # their modules may have been replaced

    def _prepare_model(self, model: torch.nn.Module, place: bool, evaluation_mode: bool) -> torch.nn.Module:
        # Sharding places parameters itself, group by group.
        return super()._prepare_model(model, place and evaluation_mode, evaluation_mode)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer, place: bool) -> torch.optim.Optimizer:
        """Give an optimizer the parameters that its model has now, and wrap it."""
        self.swap_parameters(optimizer)
        return super().setup_optimizer(optimizer, place)

    # In a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass on a loss that is already scaled for the window."""
        super().backward(loss, **kwargs)
        # A backward pass outside of `no_sync` also keeps what was accumulated before.
        self._has_unreduced |= self.in_no_sync

    def reduce_accumulated(self) -> None:
        """Reduce the gradients of a window whose last micro-batch had no backward pass."""
        if self._has_unreduced:
            # Before reducing: after an error the next step must not reduce again.
            self._has_unreduced = False
            self._reduce_pending()
        super().reduce_accumulated()

    def drop_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> bool:
        """Drop full gradients that are not reduced."""
        if not self._has_unreduced:
            return False
        self._drop_pending(None if parameters is None else {id(item) for item in parameters})
        return True

    @property
    def checkpoint(self) -> EngineCheckpoint:
        """By the plugin's state_dict_type, which may be set until a save."""
        kind = self.plugin.state_dict_type
        if kind is StateDictType.SHARDED_STATE_DICT:
            return EngineCheckpoint("sharded")
        return EngineCheckpoint("gathered" if kind is StateDictType.FULL_STATE_DICT else "full")

    def _no_sync(
        self, context: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        self._has_unreduced = True
        return super()._no_sync(context)

    def _reduce_pending(self) -> None:
        """Reduce the unreduced gradients."""
        raise NotImplementedError

    def _drop_pending(self, wanted: set[int] | None) -> None:
        """Drop the unreduced gradients.

        Args:
            wanted: The `id` of each trained tensor whose gradient is dropped; None for all.
        """
        raise NotImplementedError

    def clip_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
    ) -> torch.Tensor | None:
        """Clip gradients by their total norm over all shards, or each element."""
        tensors = tensors_with_grad(self.parameters, parameters)
        if clip_value is not None:
            return super().clip_gradients(tensors, clip_value=clip_value)
        norm = self.grad_norm(tensors, norm_type)
        if max_norm is not None:
            # As torch.nn.utils.clip_grads_with_norm_, which takes no shards on several meshes at once.
            norms.scale(gradients_of(tensors), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def grad_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The total norm of the reduced gradients, over all shards."""
        raise NotImplementedError


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
