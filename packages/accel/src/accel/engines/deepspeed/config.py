"""DeepSpeed's configuration: a tree of settings with dotted names; "auto" ones are filled in later."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_state.imports.available import is_transformers_available

_TRANSFORMERS = "transformers.integrations.deepspeed"

AUTO = "auto"
"""The value of a setting that is to be filled in."""


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, read by dotted names such as "zero_optimization.stage".

    Args:
        config_file_or_dict: Path of a JSON file, or the settings themselves (which are copied).

    Raises:
        ValueError: If it is neither, or the file has no JSON object.
        FileNotFoundError: If there is no such file.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | dict[str, Any]) -> None:
        self.config = _read(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The section that a setting is in, and the setting's name there; None without such a section."""
        return find(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """A setting, or `default` if it is missing."""
        section, name = self.find_config_node(ds_key_long)
        return default if section is None else section.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a setting or a section.

        Raises:
            ValueError: If `must_exist` and it is missing.
        """
        section, name = self.find_config_node(ds_key_long)
        if section is not None and name in section:
            del section[name]
        elif must_exist:
            raise ValueError(f"The DeepSpeed configuration has no {ds_key_long}: {self.config}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a setting exists and is true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a setting exists and is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer states are sharded, and parameters are not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether parameters or optimizer states are offloaded to the CPU or to NVMe."""
        kinds = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{kind}.device") in ("cpu", "nvme") for kind in kinds)


def find(config: dict[str, Any], name: str) -> tuple[dict[str, Any] | None, str]:
    """The section of a configuration for a dotted name, and the last part of the name."""
    *sections, last = name.split(".")
    node: Any = config
    for section in sections:
        node = node.get(section)
        if not isinstance(node, dict):
            return None, last
    return node, last


def put(config: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name, and create the sections above it."""
    *sections, last = name.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


def autos(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of the settings that are "auto"."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from autos(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value == AUTO:
            yield prefix + name


def _read(config_or_path: Any) -> dict[str, Any]:
    if isinstance(config_or_path, dict):
        # A copy, as "auto" settings are filled in in place.
        return copy.deepcopy(config_or_path)
    if not isinstance(config_or_path, str | os.PathLike):
        raise ValueError(
            f"A DeepSpeed configuration is a dict or the path of a JSON file, not "
            f"{type(config_or_path).__name__}."
        )
    path = Path(config_or_path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no DeepSpeed configuration {os.fspath(config_or_path)!r}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}), as a DeepSpeed configuration has to be."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} has a {type(config).__name__}; a DeepSpeed configuration is an object.")
    return config


def show_to_transformers(config: dict[str, Any] | None) -> HfDeepSpeedConfig | None:
    """Register a configuration with transformers, or unregister it.

    It keeps only a weak reference. Settings that are still "auto" are left out (batch sizes are 1 there):
    building a model depends only on the settings of sharding.

    Args:
        config: The configuration; None to unregister the current one.

    Returns:
        The object that transformers references weakly: keep it alive to keep the configuration registered.
        None without a configuration or without transformers.
    """
    if config is None:
        if _TRANSFORMERS in sys.modules:  # else none is registered
            sys.modules[_TRANSFORMERS].unset_hf_deepspeed_config()
        return None
    if not is_transformers_available():
        return None
    # A copy: models are built before `prepare` fills in the real one.
    shown = HfDeepSpeedConfig(_without_autos(config))
    import_module(_TRANSFORMERS).set_hf_deepspeed_config(shown)
    return shown


def _without_autos(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for name in list(autos(config)):
        section, last = find(config, name)
        assert section is not None, "autos found the setting in it"
        del section[last]
    # transformers computes other batch sizes from this one, and fails without any.
    if not isinstance(config.get("train_batch_size"), int):
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    return config
