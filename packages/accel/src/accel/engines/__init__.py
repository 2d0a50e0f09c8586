"""The registry of engines: a dotted path each, imported on first use.

Another package adds an engine by an entry point of the group "accel.engines", without a line here; see "How
to write a new engine" in docs/engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from accel.engines.base import Engine, Gradients, Loaders, States
from accel.engines.base.context import EngineContext, Prepared
from accel_state.imports.packages import install_hint, is_package_available

__all__ = [
    "ENGINES",
    "GROUP",
    "Engine",
    "EngineContext",
    "EngineRow",
    "Gradients",
    "Loaders",
    "Prepared",
    "States",
    "find_engine",
    "outside_engines",
]

GROUP = "accel.engines"
"""The entry points by which other packages add engines: the engine's name = "module:class"."""


@dataclass(frozen=True)
class EngineRow:
    """Where an engine lives, and what it needs.

    Attributes:
        path: "module:class".
        hint: What to install where something is missing.
        needs: Modules that it works with, which accel does not depend on.
    """

    path: str
    hint: str
    needs: tuple[str, ...] = ()


_TORCH = "torch 2.6 or newer, built with torch.distributed"

ENGINES: dict[str, EngineRow] = {
    "single": EngineRow("accel.engines.single:SingleEngine", "pip install torch"),
    "ddp": EngineRow("accel.engines.ddp.engine:DDPEngine", _TORCH),
    "fsdp1": EngineRow("accel.engines.fsdp1.engine:FSDP1Engine", _TORCH),
    "mesh": EngineRow("accel.engines.mesh.engine:MeshEngine", _TORCH),
    "deepspeed": EngineRow(
        "accel.engines.deepspeed.engine:DeepSpeedEngine", install_hint("deepspeed"), ("deepspeed",)
    ),
    "megatron_lm": EngineRow(
        "accel.engines.megatron.engine:MegatronLMEngine", install_hint("megatron"), ("megatron.core",)
    ),
    "xla": EngineRow(
        "accel.engines.xla:XLAEngine",
        f"{install_hint('xla')}, in the version that belongs to the installed torch",
        ("torch_xla",),
    ),
}


# Reading the metadata of all installed packages takes milliseconds, and no package is installed while a
# program runs.
@cache
def outside_engines() -> dict[str, EngineRow]:
    """The engines that other installed packages add, by name.

    Raises:
        ValueError: If a package names its engine as another one is named.
    """
    rows: dict[str, EngineRow] = {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else point.module
        if point.name in ENGINES or point.name in rows:
            raise ValueError(
                f"The package {package} adds an engine called {point.name!r}, and there is one already. Its "
                f"entry point of the group {GROUP!r} needs another name."
            )
        rows[point.name] = EngineRow(point.value, f"the package {package}")
    return rows


def find_engine(name: str) -> type[Engine]:
    """The class of an engine.

    Args:
        name: Its name in `ENGINES`, or of an entry point.

    Raises:
        ImportError: If something that it needs is missing; the message names it, and what to install.
        ValueError: If there is no engine of this name.
    """
    # Entry points are read only for names that are not built in: most programs never pay for it.
    rows = ENGINES if name in ENGINES else outside_engines()
    if name not in rows:
        known = ", ".join([*ENGINES, *rows])
        raise ValueError(
            f"There is no engine {name!r}; there are {known}. A package adds one by an entry point of the "
            f"group {GROUP!r}."
        )
    row = rows[name]
    # Found by their specification, without importing: DeepSpeed chooses its device on import.
    missing = [module for module in row.needs if not is_package_available(module)]
    if missing:
        raise ImportError(
            f"the {name.upper()} engine was asked for, and needs {', '.join(missing)}, which is not "
            f"installed. Install it with: {row.hint}"
        )
    module, _, attribute = row.path.partition(":")
    try:
        found: type[Engine] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ImportError(
            f"the {name.upper()} engine cannot be imported ({error}). It needs: {row.hint}"
        ) from error
    return found
