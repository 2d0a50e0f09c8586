"""Gradients of flat parameters, which contain the original parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from accel.engines.common.create_graph import reject_create_graph
from accel.engines.common.gradient_sync import ShardedGradientSync
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.fsdp1 import flat
from accel.engines.fsdp1.freezing import Freezing, check_hooks_of_shards, drop_stale_hooks

if TYPE_CHECKING:
    from accel.engines.fsdp1.flat_parameter_map import FlatParameterMap
    from accel_state.process.info import ProcessInfo


class FlatGradientSync(ShardedGradientSync):
    """Original parameters inside flat ones, of which each process has a shard.

    Args:
        flat_map: Maps original parameters to flat ones.
        process: This process.
    """

    def __init__(self, flat_map: FlatParameterMap, process: ProcessInfo) -> None:
        super().__init__(process)
        self._flat_map = flat_map
        self._freezing = Freezing()

    def add(self, model: torch.nn.Module) -> None:
        """Register a wrapped model."""
        self._models[model] = None
        # Once, and not in each forward pass.
        handles = [handle for _, handle in flat.fsdp_units([model])]
        model.register_forward_pre_hook(partial(check_hooks_of_shards, handles))
        model.register_forward_pre_hook(partial(drop_stale_hooks, handles))
        reject_create_graph([model], "fsdp1")
        check_same_order(model, flat.units_by_name(model), self._process, "fsdp1", FSDP_FIX)

    def trained_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter that is trained: it itself, or the flat one that contains it."""
        return self._flat_map.current(parameter)

    def trained_parameters(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that are trained, a flat one once.

        Raises:
            ValueError: If some, but not all, of the parameters in a flat one are given.
        """
        # A flat parameter is stepped as one tensor: a group cannot have a piece of it.
        self._flat_map.check_group("The optimizer", parameters)
        return list(dict.fromkeys(super().trained_parameters(parameters)))

    def is_model_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a flat parameter, or a view of one."""
        return flat.is_flattened(tensor)

    def before_backward(self) -> None:
        """Follow parameters that were frozen or unfrozen inside a window.

        Raises:
            ValueError: If the window has gradients of parameters that are frozen now.
        """
        # Outside of a window torch reduces at once, and there is nothing to lose.
        if self.has_unreduced_grads:
            self._freezing.follow(self._models)

    def reduce_pending(self) -> None:
        """Reduce the unreduced gradients.

        Raises:
            ValueError: If some belong to parameters that are frozen now; nothing is reduced.
        """
        self._freezing.finish(self._models)
        flat.reduce_gradients(self._models)

    def reshard(self) -> None:
        """Replace unsharded parameters by their shards."""
        flat.reshard(self._models)

    def drop_pending(self, wanted: set[int] | None) -> None:
        """Drop full gradients that are not reduced."""
        flat.drop_gradients(self._models, wanted)
