"""Rewrite old forms of config files."""

from __future__ import annotations

import warnings
from typing import Any

from accel_launch.errors import ConfigError
from accel_launch.settings.schema import SETTINGS, config_setting
from accel_state.env import str_to_bool

_OBSOLETE = {
    "use_xpu": "the device is detected",
    "ipex_config": "IPEX is part of torch",
    "use_mps_device": "the device is detected",
}
_RENAMED = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "amax_history_length": "fp8_amax_history_len",
    "amax_compute_algorithm": "fp8_amax_compute_algo",
}
_KINDS = {"TPU": "XLA", "MPS": "NO", "TP": "MULTI_GPU"}


def upgrade(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Rewrite the old forms in a config file's values.

    Args:
        values: The content of the file.
        where: The file, for warnings.

    Returns:
        A new dictionary in the current form; each old form causes a FutureWarning.

    Raises:
        ConfigError: If a section that is rewritten is not one, or `fp16` is neither true nor false.
    """
    # A copy; sections are copied below.
    values = dict(values)
    for name in ("dynamo_config", "tp_config", "parallelism_config"):
        # Checked first, as keys are moved between them.
        if not isinstance(values.get(name) or {}, dict):
            raise ConfigError(f"Config file {where}, key {name}: {values[name]!r} is not a section of keys.")
    if "fp16" in values:
        old = values.pop("fp16")
        # In quotes, as YAML reads a bare no as false.
        precision = "fp16" if _is_true(old, where) else "'no'"
        existing = values.setdefault("mixed_precision", precision.strip("'"))
        advice = f"use mixed_precision: {precision}"
        if existing != precision.strip("'"):
            advice = f"it is ignored, as the file has mixed_precision: {existing}"
        _note(where, f"fp16: {old}", advice)
    # A list, as the loop moves keys.
    for key in [key for key in values if key in SETTINGS and SETTINGS[key].group == "dynamo"]:
        _note(where, f"{key} at the top level", "it belongs in dynamo_config")
        values["dynamo_config"] = {**(values.get("dynamo_config") or {}), key: values.pop(key)}
    kind = str(values.get("distributed_type")).upper()
    if kind in _KINDS:
        _note(where, f"distributed_type: {kind}", f"use {_KINDS[kind]}")
        values["distributed_type"] = _KINDS[kind]
    if values.get("tp_config"):
        _note(where, "tp_config", "use parallelism_config with parallelism_config_tp_size")
        size = values["tp_config"].get("tp_size", 1)
        values["parallelism_config"] = {
            "parallelism_config_tp_size": size,
            **(values.get("parallelism_config") or {}),
        }
    # Also an empty one, which requests nothing.
    values.pop("tp_config", None)
    if values.get("gpu_ids") and isinstance(values["gpu_ids"], list):
        _note(where, f"gpu_ids: {values['gpu_ids']}", "use text such as 0,1")
        values["gpu_ids"] = ",".join(map(str, values["gpu_ids"]))
    for old, reason in _OBSOLETE.items():
        if values.pop(old, None):
            _note(where, old, f"it now has no effect: {reason}")
    return {
        key: _section(key, value, where) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _is_true(value: Any, where: str) -> bool:
    try:
        return bool(str_to_bool(str(value)))
    except ValueError as error:
        raise ConfigError(f"Config file {where}, key fp16: {error}") from None


def _section(name: str, section: dict[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for old, value in section.items():
        key = _RENAMED.get(old, old)
        setting = config_setting(str(key), name)
        if setting is not None:
            key = setting.key  # the first files had no prefixes
        if key != old:
            _note(where, f"{name}.{old}", f"use {key}")
        found[key] = value
    return found


def _note(where: str, old: str, advice: str) -> None:
    warnings.warn(
        f"Config file {where}: {old} is an old form; {advice}. `accel config update` rewrites the file.",
        FutureWarning,
        stacklevel=4,
    )
