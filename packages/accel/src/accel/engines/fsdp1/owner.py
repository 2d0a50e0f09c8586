"""The owner of flat parameters, in which those that a user holds lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from accel.engines.common.create_graph import refuse_create_graph
from accel.engines.common.owner import ShardOwner
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.fsdp1 import flat
from accel.engines.fsdp1.freezing import Freezing, check_hooks_of_shards, drop_hooks_of_others

if TYPE_CHECKING:
    from accel.engines.fsdp1.flattened import Flattened
    from accel_state.process.info import ProcessInfo


class FlatOwner(ShardOwner):
    """Parameters that lie in flat ones, of which each process has a part.

    Args:
        flattened: What took the place of what a user may hold.
        process: This process.
    """

    def __init__(self, flattened: Flattened, process: ProcessInfo) -> None:
        super().__init__(process)
        self._flattened = flattened
        self._freezing = Freezing()

    def add(self, model: torch.nn.Module) -> None:
        """Note a wrapped model."""
        self._models[model] = None
        handles = [handle for _, handle in flat.parts([model])]  # found once: a forward pass walks no modules
        model.register_forward_pre_hook(partial(check_hooks_of_shards, handles))
        model.register_forward_pre_hook(partial(drop_hooks_of_others, handles))
        refuse_create_graph(model, "fsdp1")
        check_same_order(model, flat.units(model), self._process, "fsdp1", FSDP_FIX)

    def present(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter that is stepped: it itself, or the flat one that it lies in."""
        return self._flattened.present(parameter)

    def present_all(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that are stepped, a flat one once.

        Raises:
            ValueError: If there are some of those in a flat parameter, and not all.
        """
        # A flat parameter is stepped as a whole, so that a group cannot have a part of it.
        self._flattened.check_group("The optimizer", parameters)
        return list(dict.fromkeys(super().present_all(parameters)))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a flat parameter, or lies in one."""
        return flat.is_flattened(tensor)

    def before_backward(self) -> None:
        """Let a window's gradients be those of what is trained now.

        Raises:
            ValueError: If a window has gradients of what is frozen now.
        """
        # Outside of a window torch reduces at once, and there is nothing to lose.
        if self.holds_back:
            self._freezing.follow(self._models)

    def reduce_held(self) -> None:
        """Reduce the gradients that are held back.

        Raises:
            ValueError: If some are of what is frozen now; nothing is reduced.
        """
        self._freezing.finish(self._models)
        flat.reduce(self._models)

    def show_present(self) -> None:
        """Replace gathered parameters by their shards."""
        flat.free_gathered(self._models)

    def forget_held(self, wanted: set[int] | None) -> None:
        """Drop whole gradients that are held back."""
        flat.forget(self._models, wanted)
