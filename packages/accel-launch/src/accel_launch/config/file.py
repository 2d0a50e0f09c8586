"""Read config files, YAML or JSON, and check every key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_launch.config.paths import config_path
from accel_launch.config.upgrade import upgrade
from accel_launch.errors import ConfigError
from accel_launch.settings.schema import (
    CLUSTER_KEYS,
    SAGEMAKER_KEYS,
    SETTINGS,
    Setting,
    config_setting,
    nearest,
    section_names,
)
from accel_state.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType


@dataclass(frozen=True)
class LaunchConfig:
    """A config file's content, checked.

    Keys of the file can be read as attributes; a missing key returns the default.

    Args:
        values: The content, sections nested, old forms rewritten.
        settings: The values of launch settings, by setting name.
        path: The file it came from; None for a config that is not from a file.
    """

    values: Mapping[str, Any]
    settings: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def from_values(cls, values: dict[str, Any], path: Path | None = None) -> LaunchConfig:
        """Check the content of a config file.

        Args:
            values: The content as read.
            path: The file, for messages.

        Returns:
            The checked config.

        Raises:
            ConfigError: If a key is unknown or a value is not allowed.
        """
        where = str(path or "<values>")
        # First, so that the checks below only see current forms.
        values = upgrade(values, where)
        settings: dict[str, Any] = {}
        _check_kinds(values, where)
        for key, value in values.items():
            if key in section_names():
                settings |= _section_settings(key, value, where)
            elif (setting := config_setting(key)) is not None:
                settings |= _setting_value(setting, key, value, where)
            elif key not in CLUSTER_KEYS | SAGEMAKER_KEYS:
                raise ConfigError(_unknown(key, "", where))
        if values.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER:
            cls = SageMakerConfig
        return cls(values, settings, path)

    @property
    def distributed_type(self) -> str:
        """The kind of distributed run; NO if the file does not have it."""
        return _enum_text(self.values.get("distributed_type"))

    @property
    def compute_environment(self) -> str:
        """LOCAL_MACHINE or AMAZON_SAGEMAKER."""
        return str(self.values.get("compute_environment") or ComputeEnvironment.LOCAL_MACHINE)

    def __getattr__(self, name: str) -> Any:
        # pickle and copy look for dunder methods before `settings` is set.
        if not name.startswith("_"):
            setting = config_setting(name)
            if setting is not None:
                return self.settings.get(setting.name, setting.default)
            if name in section_names():
                return self.values.get(name) or {}
            if name in CLUSTER_KEYS | SAGEMAKER_KEYS:
                return self.values.get(name)
        raise AttributeError(f"A config file has no key {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content, sections nested, as plain dictionaries."""
        # Copies of sections: callers change them.
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self.values.items()}

    def write(self, path: str | Path) -> None:
        """Write the file: JSON if the name ends in .json, else YAML.

        Args:
            path: The file; its folder is created if missing.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            import json

            text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        else:
            import yaml

            text = yaml.safe_dump(self.to_dict(), sort_keys=True)
        path.write_text(text, encoding="utf-8")


class SageMakerConfig(LaunchConfig):
    """The content of a config file for jobs on SageMaker (`compute_environment: AMAZON_SAGEMAKER`)."""


def load_config_from_file(config_file: str | Path | None = None) -> LaunchConfig:
    """Read a config file.

    Args:
        config_file: The file, YAML or JSON; the default config file if None.

    Returns:
        The checked config.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigError: If the file is empty or cannot be parsed, or has an unknown key or a value that is not
            allowed.
    """
    path = Path(config_file).expanduser() if config_file is not None else config_path()
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no config file {path}. Write one with `accel config default --config_file {path}`, or "
            "name another with --config_file."
        )
    # YAML returns None for a file of comments, and a list or text for other files.
    values = _parse(path)
    if values in (None, {}):
        raise ConfigError(
            f"Config file {path} is empty. Write it with `accel config --config_file {path}`, or remove it."
        )
    if not isinstance(values, dict):
        raise ConfigError(f"Config file {path} has a {type(values).__name__}; a mapping of keys is needed.")
    return LaunchConfig.from_values({str(key): value for key, value in values.items()}, path)


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"Config file {path} is not text in UTF-8: {error}.") from None
    if not text.strip():
        return None
    if path.suffix == ".json":
        import json

        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"Config file {path}, line {error.lineno}, column {error.colno}: {error.msg}."
            ) from None
    import yaml

    try:
        # libyaml, if PyYAML was built with it, is ten times as fast; both only load plain values.
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"Config file {path}{place}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"Config file {path}: not valid YAML: {error}") from None


def _enum_text(value: Any) -> str:
    # YAML 1.1 reads an unquoted NO as false.
    return "NO" if value in (None, False) else str(value).upper()


def _check_kinds(values: Mapping[str, Any], where: str) -> None:
    checks: list[tuple[str, Any]] = [("compute_environment", ComputeEnvironment)]
    sagemaker = values.get("compute_environment") == ComputeEnvironment.AMAZON_SAGEMAKER
    checks.append(("distributed_type", SageMakerDistributedType if sagemaker else DistributedType))
    for key, enum in checks:
        value = values.get(key)
        if value is not None and _enum_text(value) not in enum.list():
            raise ConfigError(
                f"Config file {where}, key {key}: {value!r} is not allowed; "
                f"allowed: {', '.join(enum.list())}.{nearest(_enum_text(value), enum.list())}"
            )


def _section_settings(section: str, content: Any, where: str) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"Config file {where}, key {section}: {content!r} is not a section of keys.")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        setting = config_setting(str(key), section)
        if setting is None:
            raise ConfigError(_unknown(str(key), section, where))
        settings |= _setting_value(setting, f"{section}.{key}", value, where)
    return settings


def _setting_value(setting: Setting, key: str, value: Any, where: str) -> dict[str, Any]:
    # Other programs write empty sections and values for settings that were not chosen.
    if value in (None, "", [], {}):
        return {}
    try:
        return {setting.name: setting.parse(value)}
    except ValueError as error:
        raise ConfigError(f"Config file {where}, key {key}: {error}") from None


def _unknown(key: str, section: str, where: str) -> str:
    keys = {setting.key for setting in SETTINGS.values() if setting.key and setting.section == section}
    if not section:
        keys |= CLUSTER_KEYS | SAGEMAKER_KEYS | set(section_names())
    hint = nearest(key, sorted(keys))
    home = next((name for name in section_names() if config_setting(key, name)), "")
    if home and not section:
        hint = f" It belongs in the section {home}."
    place = f"section {section} has" if section else "it has"
    return (
        f"Config file {where}: {place} the unknown key {key!r}.{hint} "
        "Correct or remove it; `accel launch --help` describes every key under the flag of its name."
    )
