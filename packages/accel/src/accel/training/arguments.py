"""Resolving the Accelerator's arguments: handlers by kind, old spellings, environment defaults."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from accel.engines import entry_point_engines
from accel.observe.base import ObserverKwargs
from accel_ckpt.config import ProjectConfiguration
from accel_data.config import DataLoaderConfiguration
from accel_optim.handlers import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs
from accel_state.enums import RNGType
from accel_state.handlers import (
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accel_state.logging.loggers import get_logger
from accel_state.logging.suggestion import did_you_mean
from accel_state.logging.warning import warn
from accel_state.step_events import Observer

if TYPE_CHECKING:
    from accel.engines import Engine
    from accel.training.types import EngineSettings

_logger = get_logger(__name__)

UNSET: Any = object()
"""Marks an argument that was not given, where None and False mean something."""


@dataclass(frozen=True)
class Handlers:
    """The kwargs handlers of one Accelerator, one of each kind."""

    autocast: AutocastKwargs | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: Any = None
    engine: Any = None  # the settings of an engine of another package
    observers: tuple[ObserverKwargs | Observer, ...] = ()

    def process_group_options(self) -> dict[str, Any]:
        """The options of `torch.distributed.init_process_group`."""
        return {} if self.init is None else self.init.to_kwargs()

    def for_plan(self) -> dict[str, Any]:
        """Those that decide how to train."""
        return {"fp8_recipe": self.fp8, "external_settings": self.engine}

    def for_engines(self) -> dict[str, Any]:
        """Those that every engine may read."""
        return {name: getattr(self, name) for name in ("autocast", "ddp", "scaler", "fp8")}


@cache
def _fields() -> dict[type, str]:
    """The field of `Handlers` of each kind of handlers."""
    # Imported with the first handler, which most programs do not have.
    from accel.precision.fp8.recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

    return {
        AutocastKwargs: "autocast",
        DistributedDataParallelKwargs: "ddp",
        GradScalerKwargs: "scaler",
        InitProcessGroupKwargs: "init",
        ProfileKwargs: "profile",
        AORecipeKwargs: "fp8",
        TERecipeKwargs: "fp8",
        MSAMPRecipeKwargs: "fp8",
    }


def sort_handlers(handlers: Sequence[KwargsHandler | Observer | EngineSettings] | None) -> Handlers:
    """Sort kwargs handlers by kind.

    Raises:
        TypeError: If one is of a kind that the Accelerator does not know.
        ValueError: If two are of one kind.
    """
    found: dict[str, Any] = {}
    observers: dict[type, ObserverKwargs | Observer] = {}
    for handler in handlers or ():
        if isinstance(handler, ObserverKwargs | Observer):
            if type(handler) in observers:
                raise ValueError(_duplicate_message(type(handler), type(handler)))
            observers[type(handler)] = handler
            continue
        field = next((name for kind, name in _fields().items() if isinstance(handler, kind)), None)
        engine = getattr(handler, "engine", None)
        # The entry points are read only for settings that name an engine: a search costs milliseconds.
        if field is None and isinstance(engine, str) and engine in entry_point_engines():
            field = "engine"
        if field is None:
            names = ", ".join(kind.__name__ for kind in _fields())
            raise TypeError(
                f"kwargs_handlers got {handler!r}; it takes instances of {names}, observers (subclasses of "
                "accel.observe.Observer; accel.observe.guard.GuardKwargs, "
                "accel.observe.statistics.StatisticsKwargs and accel.observe.watchdog.WatchdogKwargs), and "
                "settings of an engine that another package adds."
            )
        if field in found:
            raise ValueError(_duplicate_message(type(found[field]), type(handler)))
        found[field] = handler
    return Handlers(**found, observers=tuple(observers.values()))


def _duplicate_message(first: type, second: type) -> str:
    both = f"two {first.__name__}" if first is second else f"{first.__name__} and {second.__name__}"
    return f"kwargs_handlers holds {both}; pass one, with every option that you want set."


_ALWAYS_PASSED = {"find_unused_parameters"}
"""Options that no user chose: transformers' Trainer passes them in every run, and only DDP reads them."""


def warn_unread(handlers: Handlers, engine: Engine) -> None:
    """Warn of handlers that the engine ignores, if any of their options is set.

    Args:
        handlers: The handlers.
        engine: The engine.
    """
    for field, reason in engine.traits.ignored_handlers.items():
        handler = getattr(handlers, field)
        unset = {} if handler is None else vars(type(handler)())  # defaults may come from the environment
        changed = [name for name in unset if vars(handler)[name] != unset[name]]
        chosen = [name for name in changed if name not in _ALWAYS_PASSED]
        if changed:
            settings = ", ".join(f"{name}={vars(handler)[name]!r}" for name in chosen or changed)
            message = f"{type(handler).__name__}({settings}) is ignored under {engine.name}: {reason}."
            if chosen:
                warn(message)
            else:
                _logger.info("%s", message)


def resolve_dataloader_config(
    config: DataLoaderConfiguration | None, split_batches: Any
) -> DataLoaderConfiguration:
    """The loader configuration, merged with the constructor's `split_batches`.

    Raises:
        ValueError: If both are given and say different things.
    """
    if split_batches is UNSET:
        return config if config is not None else DataLoaderConfiguration()
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    # The other contradiction looks like a default:
    # config.split_batches is False where it was not set.
    if config.split_batches and not split_batches:
        raise ValueError(
            "Accelerator got split_batches=False and a dataloader_config with split_batches=True: "
            "set it in dataloader_config alone."
        )
    return replace(config, split_batches=bool(split_batches))


def resolve_project(project_dir: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """The project configuration; `project_dir` fills it where it names none, and is ignored where it does."""
    if config is None:
        return ProjectConfiguration(project_dir=project_dir)
    if project_dir is None:
        return config
    if config.project_dir is None:
        config.set_directories(project_dir)  # in place: clients read the object that they passed
    elif os.fspath(project_dir) != os.fspath(config.project_dir):
        warn(
            f"Accelerator ignores project_dir={os.fspath(project_dir)!r}: its project_config has "
            f"project_dir={os.fspath(config.project_dir)!r}. Leave one of them out.",
        )
    return config


def resolve_rng_types(rng_types: Sequence[str | RNGType] | None) -> list[RNGType]:
    """The generators synchronised at each iteration's start; the sampler's alone by default.

    Raises:
        ValueError: If a type is unknown; the message lists the known ones.
    """
    return [RNGType(kind) for kind in (rng_types if rng_types is not None else ["generator"])]


def reject_unknown(function: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for keyword arguments that a function does not have."""
    for name in unknown:
        raise TypeError(
            f"{function.__name__}() has no argument {name!r}.{did_you_mean(name, _argument_names(function))}"
        )


def reject_misspelt(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for options whose name is almost that of an argument of the function.

    Args:
        function: A function that passes further keyword arguments on.
        options: These keyword arguments.
    """
    for name in options:
        # Strict, as an engine's options may resemble them.
        if suggestion := did_you_mean(name, _argument_names(function), cutoff=0.8):
            raise TypeError(f"{function.__name__}() has no argument {name!r}.{suggestion}")


def _argument_names(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    # `run` is the first argument of our functions, which methods of the Accelerator pass.
    return [
        name
        for name, one in parameters.items()
        if name not in ("self", "run") and one.kind is not one.VAR_KEYWORD
    ]


def resolve_deprecated(
    deprecated: Mapping[str, Any],
    mixed_precision: Any,
    loaders: DataLoaderConfiguration | None,
    project: ProjectConfiguration | None,
) -> tuple[Any, DataLoaderConfiguration | None, ProjectConfiguration | None]:
    """Translate deprecated arguments, each with a FutureWarning.

    Args:
        deprecated: Their values by name; UNSET where one was not passed.
        mixed_precision: The current argument, which wins over `fp16`.
        loaders: The current dataloader_config.
        project: The current project_config.

    Returns:
        mixed_precision, dataloader_config and project_config.
    """
    for name, value in deprecated.items():
        if value is UNSET:
            continue
        if name == "fp16":
            _warn_deprecated(name, f"mixed_precision={'fp16' if value else 'no'!r}")
            mixed_precision = mixed_precision or ("fp16" if value else "no")
        elif name == "logging_dir":
            _warn_deprecated(name, f"project_config=ProjectConfiguration(logging_dir={value!r})")
            project = replace(project or ProjectConfiguration(), logging_dir=value)
        else:
            _warn_deprecated(name, f"dataloader_config=DataLoaderConfiguration({name}={value!r})")
            loaders = replace(loaders or DataLoaderConfiguration(), **{name: value})
    return mixed_precision, loaders, project


def _warn_deprecated(name: str, now: str) -> None:
    warn(f"Accelerator({name}=...) is the old spelling; write {now}.", FutureWarning)
