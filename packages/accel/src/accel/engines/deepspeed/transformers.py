"""Showing DeepSpeed's configuration to transformers, which shards models while it builds them if asked to."""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from typing import Any

from accel.engines.deepspeed.config import AUTO, HfDeepSpeedConfig, autos, find
from accel_state.imports.available import is_transformers_available

__all__ = ["show_to_transformers"]

_MODULE = "transformers.integrations.deepspeed"


def show_to_transformers(config: dict[str, Any] | None) -> HfDeepSpeedConfig | None:
    """Let transformers find a configuration, or none.

    It keeps a weak reference alone. What is still "auto" is left out (batch sizes are 1 there): building a
    model depends on the sharding's settings, and on no others.

    Args:
        config: The configuration; None to have it forget the one it knows.

    Returns:
        What transformers refers to: whoever keeps it keeps the configuration known. None without a
        configuration or without transformers.
    """
    if config is None:
        if _MODULE in sys.modules:  # else it knows none
            sys.modules[_MODULE].unset_hf_deepspeed_config()
        return None
    if not is_transformers_available():
        return None
    shown = HfDeepSpeedConfig(_without_autos(config))
    import_module(_MODULE).set_hf_deepspeed_config(shown)
    return shown


def _without_autos(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for name in list(autos(config)):
        section, last = find(config, name)
        assert section is not None, "it holds the setting"
        del section[last]
    if not isinstance(config.get("train_batch_size"), int):
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    assert AUTO not in config.values(), "they are left out"
    return config
