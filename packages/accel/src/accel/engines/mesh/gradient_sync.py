"""Gradients of sharded parameters, and a map from every form of a parameter to its trained shard."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel.engines.common.create_graph import reject_create_graph
from accel.engines.common.gradient_sync import ShardedGradientSync
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.common.swap_parameters import ParameterMap
from accel.engines.mesh import fsdp2_private

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class MeshGradientSync(ShardedGradientSync):
    """Parameters that `fully_shard` and tensor parallelism have replaced.

    A parameter exists in up to three forms: as the original model had it, as the shard that optimizers step,
    and unsharded, as the module has it between forward and backward. All map to the shard.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        super().__init__(process)
        self.parameter_map = ParameterMap()
        self._units: weakref.WeakKeyDictionary[FSDPModule, None] = weakref.WeakKeyDictionary()
        # By identity: `==` of tensors compares elements.
        self._shards: Any = WeakIdKeyDictionary()
        self._unused: list[Any] = []  # parameters without a gradient here, until the window ends

    def add(self, model: torch.nn.Module, before: dict[torch.nn.Parameter, list[str]], engine: str) -> None:
        """Register a model that was parallelized.

        Args:
            model: The model.
            before: The parameters that it had before, with their names.
            engine: The name of the engine.
        """
        self.parameter_map.record(before, model)
        self._models[model] = None
        hooks = {
            id(self.parameter_map.current(old)): old._backward_hooks for old in before if old._backward_hooks
        }
        units: dict[str, Any] = {
            name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)
        }
        self._units.update(dict.fromkeys(units.values()))
        for unit in units.values():
            fsdp2_private.reduce_unused_as_zeros(unit, self._unused)
            fsdp2_private.move_hooks(unit, hooks)
        split = (
            module
            for module in model.modules()
            if any(isinstance(item, DTensor) for item in module._parameters.values())
        )
        reject_create_graph([model, *(units.values() or split)], engine)
        check_same_order(model, units, self._process, engine, FSDP_FIX)
        for parameter in model.parameters():
            self._shards[parameter] = None
        if isinstance(model, FSDPModule):
            # Makes `model.zero_grad()` clear unreduced gradients too.
            fsdp2_private.patch_zero_grad(model)

    def is_model_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of a parallelized model, or one that it replaced."""
        return self.parameter_map.current(tensor) in self._shards

    def trained_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The shard of a parameter."""
        if parameter not in self._shards and not self.parameter_map.contains(parameter):
            # Recorded here and not in each forward pass: few programs keep unsharded parameters.
            for full, shard in fsdp2_private.unsharded_parameters(self._units):
                self.parameter_map.add(full, shard)
        return self.parameter_map.current(parameter)

    def gradients(self) -> list[torch.Tensor]:
        """The full gradients that are not reduced until the window ends."""
        return [gradient for _, gradient in fsdp2_private.unreduced_gradients(self._units)]

    def reduce_pending(self) -> None:
        """Reduce the unreduced gradients."""
        for model in self._models:
            if isinstance(model, FSDPModule):
                fsdp2_private.reduce_gradients(model)

    def finish_window(self) -> None:
        """Reduce what is left, and drop the gradients of parameters that no process has used."""
        super().finish_window()
        if self._unused:
            fsdp2_private.drop_unused(self._unused)

    def reshard(self) -> None:
        """Replace unsharded parameters by their shards."""
        fsdp2_private.reshard(self._units)

    def drop_pending(self, wanted: set[int] | None) -> None:
        """Drop full gradients that are not reduced."""
        fsdp2_private.drop_gradients(self._units, wanted)
