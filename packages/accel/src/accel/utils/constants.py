"""Constants under their documented path."""

from __future__ import annotations

from accel.plugins.fsdp import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY

__all__ = ["FSDP_AUTO_WRAP_POLICY", "FSDP_SHARDING_STRATEGY"]
