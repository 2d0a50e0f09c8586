"""Effective settings: flag > environment > config file > default, each with its source."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from accel_launch.errors import LaunchError, NotAvailableError
from accel_launch.schema import GROUPS, SETTINGS, Setting

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig

__all__ = ["Effective", "Settings", "Source", "resolve"]


class Source(IntEnum):
    """Where a value came from; a higher one wins."""

    DEFAULT = 0
    DETECTED = 1
    CONFIG = 2
    ENVIRONMENT = 3
    FLAG = 4


@dataclass(frozen=True)
class Effective:
    """A value and where it came from.

    Args:
        value: The value.
        source: What kind of place gave it.
        detail: The very place: a flag, a variable, a file.
    """

    value: Any
    source: Source = Source.DEFAULT
    detail: str = "default"

    @property
    def given(self) -> bool:
        """Whether a user gave it, rather than detection or the default."""
        return self.source >= Source.CONFIG


class Settings(Mapping[str, Effective]):
    """Every launch setting's effective value, by name."""

    def __init__(self, effective: Mapping[str, Effective]) -> None:
        self._effective = dict(effective)

    def __getitem__(self, name: str) -> Effective:
        return self._effective[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._effective)

    def __len__(self) -> int:
        return len(self._effective)

    def value(self, name: str) -> Any:
        """Return a setting's value.

        Args:
            name: The setting's name.
        """
        return self[name].value

    def given(self, name: str) -> bool:
        """Tell whether a user gave the setting.

        Args:
            name: The setting's name.
        """
        return self[name].given

    def active(self, setting: Setting) -> bool:
        """Tell whether a setting counts: whether its group is switched on.

        Args:
            setting: The setting.
        """
        group = GROUPS[setting.group]
        if not group.enabled_by or setting.name == group.enabled_by:
            return True
        return group.enabled(self.value(group.enabled_by))

    def replace(self, **changes: Effective) -> Settings:
        """Return a copy with some settings replaced.

        Args:
            **changes: The new effective values, by name.
        """
        return Settings({**self._effective, **changes})


def resolve(args: argparse.Namespace, config: LaunchConfig | None, environ: Mapping[str, str]) -> Settings:
    """Give every setting its effective value.

    Args:
        args: The parsed flags; None, or no attribute, where a flag was not given.
        config: The config file's content, if there is a file.
        environ: The environment.

    Returns:
        The settings; what detection decides is still at its default.

    Raises:
        LaunchError: If a variable's text is not allowed, or settings exclude each other.
        NotAvailableError: If something was asked for that this version cannot start.
    """
    settings = Settings({s.name: _effective(s, args, config, environ) for s in SETTINGS.values()})
    if config is not None:
        settings = _apply_kind(settings, config)
    settings = _settle_exclusive(settings)
    _refuse_missing(settings, config)
    _warn_ignored(settings)
    return settings


# Inside a worker of another run these describe that run, not the one to be started.
_WORLD = ("ACCELERATE_NUM_PROCESSES", "MASTER_ADDR", "MASTER_PORT")


def _effective(
    setting: Setting, args: argparse.Namespace, config: LaunchConfig | None, environ: Mapping[str, str]
) -> Effective:
    flag = getattr(args, setting.name, None)
    if flag is not None:
        return Effective(flag, Source.FLAG, setting.flag)
    variable = setting.spec.name
    if setting.from_environment and not (variable in _WORLD and "LOCAL_RANK" in environ):
        text = environ.get(variable)
        # An empty CUDA_VISIBLE_DEVICES hides every GPU; any other empty variable counts as unset.
        if text or (text is not None and variable == "CUDA_VISIBLE_DEVICES"):
            try:
                return Effective(setting.parse(text), Source.ENVIRONMENT, variable)
            except ValueError as error:
                raise LaunchError(f"Environment variable {variable}: {error}") from None
    if config is not None and setting.name in config.settings:
        return Effective(config.settings[setting.name], Source.CONFIG, str(config.path))
    return Effective(setting.default)


_KINDS = {
    "MULTI_CPU": "cpu",
    "MULTI_GPU": "multi_gpu",
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}


def _apply_kind(settings: Settings, config: LaunchConfig) -> Settings:
    """Let the config's distributed_type and sections switch on what they stand for."""
    changes: dict[str, Effective] = {}
    kind = _KINDS.get(config.distributed_type)
    chosen = any(settings.value(name) and settings.given(name) for name in _KINDS.values() if name != "cpu")
    if kind is not None and not settings.given(kind) and not chosen:
        changes[kind] = Effective(True, Source.CONFIG, f"{config.path} (distributed_type)")
    if config.values.get("parallelism_config") and not settings.given("use_parallelism_config"):
        changes["use_parallelism_config"] = Effective(
            True, Source.CONFIG, f"{config.path} (parallelism_config)"
        )
    return settings.replace(**changes)


_EXCLUSIVE = (
    ("module", "no_python"),
    ("multi_gpu", "cpu", "tpu"),
    ("use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu"),
    ("tpu_cluster", "no_tpu_cluster"),
)


def _settle_exclusive(settings: Settings) -> Settings:
    """Where two settings exclude each other the nearer source wins; from one source they are an error."""
    for names in _EXCLUSIVE:
        on = sorted((n for n in names if settings.value(n)), key=lambda n: -settings[n].source)
        if len(on) > 1 and settings[on[0]].source == settings[on[1]].source:
            places = " and ".join(f"{SETTINGS[n].flag} ({settings[n].detail})" for n in on[:2])
            raise LaunchError(f"{places} exclude each other; choose one.")
        winner = settings[on[0]] if on else None
        if winner is not None:
            settings = settings.replace(**{n: Effective(False, winner.source, winner.detail) for n in on[1:]})
    return settings


_DEMANDING = ("tpu", "tpu_cluster", "use_deepspeed", "use_megatron_lm")


def _refuse_missing(settings: Settings, config: LaunchConfig | None) -> None:
    """Stop at whatever this version cannot start, rather than start something else."""
    if config is not None and config.compute_environment == "AMAZON_SAGEMAKER":
        raise NotAvailableError(
            f"Config file {config.path} is for Amazon SageMaker, which this version cannot start yet. Use a "
            "config with compute_environment: LOCAL_MACHINE."
        )
    for setting in SETTINGS.values():
        missing = GROUPS[setting.group].missing
        found = settings[setting.name]
        if not missing or found.value == setting.default:
            continue
        # A file or the environment may hold settings of engines that are not switched on; a flag is meant.
        if found.source == Source.FLAG or (found.given and setting.name in _DEMANDING):
            raise NotAvailableError(
                f"{setting.flag} (from {found.detail}) needs {missing}, which this version cannot start yet. "
                "Leave it out; `accel launch --help` lists what is available."
            )


def _warn_ignored(settings: Settings) -> None:
    ignored: dict[str, list[str]] = {}
    for setting in SETTINGS.values():
        found = settings[setting.name]
        counts = found.source in (Source.FLAG, Source.CONFIG) and found.value != setting.default
        if counts and not settings.active(setting) and not GROUPS[setting.group].missing:
            ignored.setdefault(GROUPS[setting.group].remedy, []).append(f"{setting.name} ({found.detail})")
    for remedy, names in ignored.items():
        warnings.warn(f"Ignored without {remedy}: {', '.join(names)}.", UserWarning, stacklevel=4)
