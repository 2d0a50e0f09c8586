"""Settings of DeepSpeed that are given and that nothing reads."""

from __future__ import annotations

from typing import Any

from accel.engines.common.ignored import tell_ignored

__all__ = ["tell_unused"]


def tell_unused(plugin: Any) -> None:
    """Warn of settings that are given and that nothing reads.

    Args:
        plugin: The DeepSpeedPlugin, with the values of its configuration and the environment.
    """
    reasons = {
        f"offload_{what}_nvme_path": f"offload_{what}_device is not 'nvme'"
        for what in ("optimizer", "param")
        if getattr(plugin, f"offload_{what}_device") != "nvme"
    }
    if not plugin.enable_msamp:
        reasons["msamp_opt_level"] = "enable_msamp is not set"
    if plugin.zero_stage != 3:
        reasons["transformer_moe_cls_names"] = "parameters are sharded by zero_stage=3 alone"
    given = {name: reason for name, reason in reasons.items() if getattr(plugin, name) not in (None, "none")}
    tell_ignored(plugin, given)
