"""Models that are large for the memory at hand, under their documented path: re-exports."""

from __future__ import annotations

from accel.big_models.empty import init_empty_weights, init_on_device
from accel.big_models.layerwise_casting import attach_layerwise_casting_hooks

__all__ = ["attach_layerwise_casting_hooks", "init_empty_weights", "init_on_device"]
