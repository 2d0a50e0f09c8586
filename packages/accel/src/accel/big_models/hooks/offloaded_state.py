"""State dicts of modules with offloaded weights, which include these weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn


class _Slot(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def placeholder(self) -> torch.Tensor: ...


def keep_state(
    module: nn.Module, slots: Sequence[_Slot], value: Callable[[Any], torch.Tensor]
) -> tuple[Any, ...]:
    """Put offloaded weights into the state dicts of a module, and reject loading values that would be lost.

    Args:
        module: The module.
        slots: Its offloaded weights.
        value: Returns one of these, without keeping it in memory.

    Returns:
        Handles; their `remove()` restores the module's own behaviour.
    """
    state = _OffloadedState(slots, value)
    untyped: Any = module
    return (
        # Private in torch: 2.13 has public forms of both, register_state_dict_post_hook and
        # register_load_state_dict_pre_hook.
        untyped._register_state_dict_hook(state.add_weights),
        untyped._register_load_state_dict_pre_hook(state.reject),
    )


class _OffloadedState:
    """The module's hooks on state dicts: methods, so that the module can be copied and pickled."""

    def __init__(self, slots: Sequence[_Slot], value: Callable[[Any], torch.Tensor]) -> None:
        self.slots = slots
        self.value = value

    def add_weights(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for slot in self.slots:
            existing = state_dict.get(prefix + slot.name)
            if isinstance(existing, torch.Tensor) and existing.is_meta:
                # A mapped weight stays on the disk until it is used.
                state_dict[prefix + slot.name] = self.value(slot).detach().to(slot.placeholder.dtype)

    def reject(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        lost = [prefix + slot.name for slot in self.slots if prefix + slot.name in state_dict]
        if lost:
            raise RuntimeError(
                f"load_state_dict cannot load {', '.join(lost)}: offloaded weights are not in the model. "
                "Remove its hooks first (remove_hook_from_submodules), or load with "
                "load_checkpoint_and_dispatch."
            )
