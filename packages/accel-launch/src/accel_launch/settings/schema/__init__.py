"""The one schema of launch settings: flags, config keys, variables, kinds, defaults, choices and help.

The parser, the config reader, the resolution and the children's environment are all built from `SETTINGS`;
a setting is added here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from accel_launch.settings.schema.engines import ENGINE_GROUPS, ENGINES
from accel_launch.settings.schema.general import GENERAL, GENERAL_GROUPS, machine_range
from accel_launch.settings.schema.setting import Group, Setting

__all__ = [
    "CLUSTER_KEYS",
    "GROUPS",
    "SAGEMAKER_KEYS",
    "SETTINGS",
    "Group",
    "Setting",
    "config_setting",
    "machine_range",
    "nearest",
    "section_names",
]

GROUPS: dict[str, Group] = {**GENERAL_GROUPS, **ENGINE_GROUPS}
"""Every group by its key, in the order of `--help`."""

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in GENERAL + ENGINES}
"""Every setting by name."""

CLUSTER_KEYS = frozenset({"compute_environment", "distributed_type", "command_file", "commands"})
"""Top-level keys of a config file that no flag of `accel launch` stands for."""

SAGEMAKER_KEYS = frozenset(
    {
        "additional_args",
        "base_job_name",
        "ec2_instance_type",
        "iam_role_name",
        "image_uri",
        "profile",
        "py_version",
        "pytorch_version",
        "region",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "transformers_version",
    }
)
"""Further keys of a config file for Amazon SageMaker."""

_BY_KEY = {(setting.section, setting.key): setting for setting in SETTINGS.values() if setting.key}
_SECTIONS = tuple(dict.fromkeys(section for section, _ in _BY_KEY if section))

# fsdp_config has keys fsdp_..., and so on; only parallelism_config keeps its full name as the prefix.
_PREFIXES = {section: section.removesuffix("config") for section in _SECTIONS} | {
    "parallelism_config": "parallelism_config_"
}


def section_names() -> tuple[str, ...]:
    """Return the names of the config file's sections."""
    return _SECTIONS


def config_setting(key: str, section: str = "") -> Setting | None:
    """Find the setting of a config key.

    Args:
        key: The key as written; inside a section the prefix of its flags may be left out, as old files do.
        section: The section's name; empty for the top level.

    Returns:
        The setting, or None if there is no such key.
    """
    # With the prefix of its flags, and as old files have it, without.
    return _BY_KEY.get((section, key)) or _BY_KEY.get((section, _PREFIXES.get(section, "") + key))


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint naming the known word nearest to an unknown one, or an empty string if none is near.

    Args:
        word: The unknown word.
        words: The known ones.
    """
    from difflib import get_close_matches

    # 0.6 is difflib's default: near enough for typing errors, far enough for other words.
    found = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f" Did you mean {found[0]}?" if found else ""
