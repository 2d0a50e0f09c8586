"""Hooks on a module's forward, under their documented path: re-exports."""

from __future__ import annotations

from accel.big_models.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel.big_models.layerwise_casting import LayerwiseCastingHook

__all__ = [
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
