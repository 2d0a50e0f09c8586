"""Effective settings: flag > environment > config file > default, each with its source."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from accel_launch.errors import LaunchError
from accel_launch.settings.schema import GROUPS, SETTINGS, Setting

if TYPE_CHECKING:
    from accel_launch.config import LaunchConfig
    from accel_launch.settings.slurm_job import Step


class Source(IntEnum):
    """Where a value came from; a higher one wins."""

    DEFAULT = 0
    # Above the default and below whatever a user says.
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
    def is_set(self) -> bool:
        """Whether a user gave it, rather than detection or the default."""
        return self.source >= Source.CONFIG


class Settings(Mapping[str, Effective]):
    """Every launch setting's effective value, by name.

    Args:
        effective: The values.
        slurm: The place in a Slurm job that the run follows, if there is one.
    """

    def __init__(self, effective: Mapping[str, Effective], slurm: Step | None = None) -> None:
        self._effective = dict(effective)
        self.slurm = slurm

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

    def is_set(self, name: str) -> bool:
        """Return whether a user gave the setting.

        Args:
            name: The setting's name.
        """
        return self[name].is_set

    def active(self, setting: Setting) -> bool:
        """Return whether a setting counts: whether its group is switched on.

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
        return Settings({**self._effective, **changes}, self.slurm)


def resolve(args: argparse.Namespace, config: LaunchConfig | None, environ: Mapping[str, str]) -> Settings:
    """Give every setting its effective value.

    Args:
        args: The parsed flags; None, or no attribute, if a flag was not passed.
        config: The config file's content, if there is a file.
        environ: The environment.

    Returns:
        The settings; what detection decides is still at its default.

    Raises:
        LaunchError: If a variable's text is not allowed, or settings exclude each other.
    """
    slurm = _slurm_step(args, environ)
    cluster = slurm.values() if slurm is not None else {}
    effective = {s.name: _effective(s, args, config, environ, cluster) for s in SETTINGS.values()}
    settings = Settings(effective, slurm)
    if config is not None:
        settings = _apply_kind(settings, config)
    # After the kind of the config file, which a flag may exclude.
    settings = _resolve_exclusive(settings)
    _warn_ignored(settings)
    return settings


# Inside a worker of another run these describe that run, not the one to be started.
_WORLD = ("ACCELERATE_NUM_PROCESSES", "MASTER_ADDR", "MASTER_PORT")


def _slurm_step(args: argparse.Namespace, environ: Mapping[str, str]) -> Step | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    from accel_launch.settings.slurm_job import step_to_follow

    return step_to_follow(environ, lambda name: getattr(args, name, None))


def _effective(
    setting: Setting,
    args: argparse.Namespace,
    config: LaunchConfig | None,
    environ: Mapping[str, str],
    cluster: Mapping[str, tuple[Any, str]],
) -> Effective:
    flag = getattr(args, setting.name, None)
    # Switches are None if they were not passed: False means `=false`.
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
    # Behind variables of the setting itself: a job script sets those to override what Slurm says.
    if setting.name in cluster:
        value, source = cluster[setting.name]
        return Effective(value, Source.ENVIRONMENT, source)
    if config is not None and setting.name in config.settings:
        return Effective(config.settings[setting.name], Source.CONFIG, str(config.path))
    return Effective(setting.default)


# MULTI_CPU and MULTI_GPU are not engines; the others enable their setting.
_KINDS = {
    "MULTI_CPU": "cpu",
    "MULTI_GPU": "multi_gpu",
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "XLA": "tpu",
}


def _apply_kind(settings: Settings, config: LaunchConfig) -> Settings:
    """Switch on the settings that the config's distributed_type and sections imply."""
    changes: dict[str, Effective] = {}
    kind = _KINDS.get(config.distributed_type)
    # A flag or a variable requested another kind: the file's kind is dropped.
    chosen = any(settings.value(name) and settings.is_set(name) for name in _KINDS.values() if name != "cpu")
    if kind is not None and not settings.is_set(kind) and not chosen:
        changes[kind] = Effective(True, Source.CONFIG, f"{config.path} (distributed_type)")
    if config.values.get("parallelism_config") and not settings.is_set("use_parallelism_config"):
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


def _resolve_exclusive(settings: Settings) -> Settings:
    """If two settings exclude each other, the higher source wins; from one source they are an error."""
    # The higher source is the later request, such as a flag over a config file.
    for names in _EXCLUSIVE:
        on = sorted((n for n in names if settings.value(n)), key=lambda n: -settings[n].source)
        if len(on) > 1 and settings[on[0]].source == settings[on[1]].source:
            places = " and ".join(f"{SETTINGS[n].flag} ({settings[n].detail})" for n in on[:2])
            raise LaunchError(f"{places} exclude each other; choose one.")
        winner = settings[on[0]] if on else None
        if winner is not None:
            settings = settings.replace(**{n: Effective(False, winner.source, winner.detail) for n in on[1:]})
    return settings


def _warn_ignored(settings: Settings) -> None:
    ignored: dict[str, list[str]] = {}
    for setting in SETTINGS.values():
        found = settings[setting.name]
        counts = found.source in (Source.FLAG, Source.CONFIG) and found.value != setting.default
        if counts and not settings.active(setting):
            ignored.setdefault(GROUPS[setting.group].remedy, []).append(f"{setting.name} ({found.detail})")
    for remedy, names in ignored.items():
        warnings.warn(f"Ignored without {remedy}: {', '.join(names)}.", UserWarning, stacklevel=4)
