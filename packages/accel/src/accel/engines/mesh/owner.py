"""The owner of sharded parameters: a map from any tensor that a user can hold to the stepped shard."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from accel.engines.common.create_graph import refuse_create_graph
from accel.engines.common.owner import ShardOwner
from accel.engines.common.repoint import Replaced
from accel.engines.common.same_order import FSDP_FIX, check_same_order
from accel.engines.mesh import unsharded

if TYPE_CHECKING:
    from accel_state.process.info import ProcessInfo


class MeshOwner(ShardOwner):
    """Parameters that `fully_shard` and tensor parallelism have replaced.

    A parameter is there up to three times: as the user's model had it, as the shard that optimizers step, and
    as the whole one that the module shows from a forward pass to its backward pass. All lead to the shard.

    Args:
        process: This process.
    """

    def __init__(self, process: ProcessInfo) -> None:
        super().__init__(process)
        self.replaced = Replaced()
        self._parts: weakref.WeakKeyDictionary[FSDPModule, None] = weakref.WeakKeyDictionary()
        # By identity, as `==` of tensors compares elements.
        self._shards: Any = WeakIdKeyDictionary()
        self._filled: list[Any] = []  # parameters without a gradient here, until the window ends

    def add(self, model: torch.nn.Module, before: dict[torch.nn.Parameter, list[str]], engine: str) -> None:
        """Note a model that was made parallel.

        Args:
            model: The model.
            before: The parameters that it had, with their names.
            engine: What the engine is called.
        """
        self.replaced.note(before, model)
        self._models[model] = None
        hooks = {id(self.replaced.present(old)): old._backward_hooks for old in before if old._backward_hooks}
        parts: dict[str, Any] = {
            name: part for name, part in model.named_modules() if isinstance(part, FSDPModule)
        }
        self._parts.update(dict.fromkeys(parts.values()))
        for part in parts.values():
            unsharded.fill_unused(part, self._filled)
            unsharded.carry_hooks(part, hooks)
        refuse_create_graph(model, engine)
        check_same_order(model, parts, self._process, engine, FSDP_FIX)
        for parameter in model.parameters():
            self._shards[parameter] = None
        if isinstance(model, FSDPModule):
            # `model.zero_grad()` of a user knows nothing of gradients that are held back.
            unsharded.clear_with(model)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter of a model that was made parallel, or one that it replaced."""
        return self.replaced.present(tensor) in self._shards

    def present(self, parameter: torch.Tensor) -> torch.Tensor:
        """The shard of a parameter."""
        if parameter not in self._shards and not self.replaced.knows(parameter):
            # Noted when somebody shows up with one, and not in each forward pass: few programs hold gathered
            # parameters.
            for whole, shard in unsharded.gathered(self._parts):
                self.replaced.add(whole, shard)
        return self.replaced.present(parameter)

    def gradients(self) -> list[torch.Tensor]:
        """The whole gradients that are held back until the window ends."""
        return [gradient for _, gradient in unsharded.gradients(self._parts)]

    def reduce_held(self) -> None:
        """Reduce the gradients that are held back."""
        for model in self._models:
            if isinstance(model, FSDPModule):
                unsharded.reduce(model)

    def finish_window(self) -> None:
        """Reduce what is left, and drop the gradients of parameters that no process has used."""
        super().finish_window()
        if self._filled:
            unsharded.drop_unused(self._filled)

    def show_present(self) -> None:
        """Replace gathered parameters by their shards."""
        unsharded.free_gathered(self._parts)

    def forget_held(self, wanted: set[int] | None) -> None:
        """Drop whole gradients that are held back."""
        unsharded.forget(self._parts, wanted)
