"""The registry of engines: one dotted path each, imported on first use.

Other packages add engines by an entry point of the group "accel.engines"; see "How to write a new engine" in
docs/engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from accel.engines.base import Engine
from accel.engines.context import (
    DataParallel,
    EngineCheckpoint,
    EngineContext,
    EngineTraits,
    NativeCheckpoint,
    PrepareRequest,
    UnevenInputs,
)
from accel_state.imports.packages import install_hint, is_package_available

__all__ = [
    "ENGINES",
    "ENTRY_POINT_GROUP",
    "DataParallel",
    "Engine",
    "EngineCheckpoint",
    "EngineContext",
    "EngineEntry",
    "EngineTraits",
    "NativeCheckpoint",
    "PrepareRequest",
    "UnevenInputs",
    "entry_point_engines",
    "find_engine",
    "plugin_class",
]

ENTRY_POINT_GROUP = "accel.engines"
"""The group of entry points by which other packages add engines: engine name = "module:class"."""


_RENAMED = {
    "wrap_model": "setup_model",
    "prepare_optimizer": "setup_optimizer",
    "prepare_scheduler": "setup_scheduler",
    "check_collectively": "check",
    "gradients_type": "a part of Engine",
    "states_type": "a part of Engine",
    "loaders_type": "a part of Engine",
    "settings_type": "a field of traits",
    "takes_gradient": "a field of traits",
    "ignored_handlers": "a field of traits",
}
"""Members of engines until accel 0.2, which would be ignored silently in those of other packages."""


@dataclass(frozen=True)
class EngineEntry:
    """Where to import an engine from, and what it requires.

    Attributes:
        path: "module:class".
        hint: What to install if a requirement is missing.
        needs: Required modules that are not dependencies of accel.
    """

    path: str
    hint: str
    needs: tuple[str, ...] = ()


_TORCH = "torch 2.10 or newer, built with torch.distributed"

ENGINES: dict[str, EngineEntry] = {
    "single": EngineEntry("accel.engines.single:SingleEngine", "pip install torch"),
    "ddp": EngineEntry("accel.engines.ddp:DDPEngine", _TORCH),
    "fsdp1": EngineEntry("accel.engines.fsdp1.engine:FSDP1Engine", _TORCH),
    **dict.fromkeys(
        ("fsdp2", "fsdp2 x tp", "fsdp2 x cp", "fsdp2 x cp x tp", "ddp x tp", "tp"),
        EngineEntry("accel.engines.fsdp2:MeshEngine", _TORCH),
    ),
    "deepspeed": EngineEntry(
        "accel.engines.deepspeed.engine:DeepSpeedEngine", install_hint("deepspeed"), ("deepspeed",)
    ),
    "megatron_lm": EngineEntry(
        "accel.engines.megatron.engine:MegatronLMEngine", install_hint("megatron"), ("megatron.core",)
    ),
    "xla": EngineEntry(
        "accel.engines.xla:XLAEngine",
        f"{install_hint('xla')}, in the version that belongs to the installed torch",
        ("torch_xla",),
    ),
}


# By path, so that no plugin's module (and what it imports) is loaded for engines that were not requested.
_PLUGINS = {
    "deepspeed_plugin": "accel.engines.deepspeed.plugin:DeepSpeedPlugin",
    "fsdp_plugin": "accel.engines.fsdp_plugin:FullyShardedDataParallelPlugin",
    "megatron_lm_plugin": "accel.engines.megatron.plugin:MegatronLMPlugin",
    "torch_tp_plugin": "accel.engines.tp_plugin:TorchTensorParallelPlugin",
}


def plugin_class(argument: str) -> type:
    """The class of the plugins that an argument of the Accelerator takes."""
    module, _, name = _PLUGINS[argument].partition(":")
    kind: type = getattr(import_module(module), name)
    return kind


# Reading the metadata of all installed packages takes milliseconds, and no package is installed while a
# program runs.
@cache
def entry_point_engines() -> dict[str, EngineEntry]:
    """The engines that other installed packages add, by name.

    Raises:
        ValueError: If two engines have the same name.
    """
    entries: dict[str, EngineEntry] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        package = point.dist.name if point.dist is not None else point.module
        if point.name in ENGINES or point.name in entries:
            raise ValueError(
                f"The package {package} adds an engine called {point.name!r}, and there is one already. Its "
                f"entry point of the group {ENTRY_POINT_GROUP!r} needs another name."
            )
        entries[point.name] = EngineEntry(point.value, f"the package {package}")
    return entries


def find_engine(name: str) -> type[Engine]:
    """The class of an engine.

    Args:
        name: A name in `ENGINES`, or of an entry point.

    Raises:
        ImportError: If a requirement is missing; the message names it, and what to install.
        ValueError: If there is no engine of this name.
    """
    # Entry points are read only for names that are not built in, as reading them takes time.
    entries = ENGINES if name in ENGINES else entry_point_engines()
    if name not in entries:
        names = ", ".join([*ENGINES, *entries])
        raise ValueError(
            f"There is no engine {name!r}; there are {names}. A package adds one by an entry point of the "
            f"group {ENTRY_POINT_GROUP!r}."
        )
    entry = entries[name]
    # Checked without importing: DeepSpeed chooses its device on import.
    missing = [module for module in entry.needs if not is_package_available(module)]
    if missing:
        raise ImportError(
            f"the {name.upper()} engine was requested, and needs {', '.join(missing)}, which is not "
            f"installed. Install it with: {entry.hint}"
        )
    module, _, attribute = entry.path.partition(":")
    try:
        engine: type[Engine] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ImportError(
            f"the {name.upper()} engine cannot be imported ({error}). It needs: {entry.hint}"
        ) from error
    for old, new in _RENAMED.items():
        if hasattr(engine, old):
            raise TypeError(f"the {name} engine has {old}, which has no effect any more: it is {new} now.")
    return engine
