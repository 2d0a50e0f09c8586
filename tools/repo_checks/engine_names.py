"""Names of single engines stay in `accel/engines`; what is documented elsewhere is in a list that shrinks.

No engine imports another one.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from repo_checks.tree import Module

__all__ = ["LIST", "check_engine_imports", "check_engine_names"]

LIST = Path("tools/reference/engine_names.txt")
_ENGINE = re.compile(r"deepspeed|megatron|ulysses|fsdp|(^|_)ddp|zero3", re.IGNORECASE)
_ENGINES = ("ddp", "deepspeed", "fsdp1", "fsdp2", "megatron", "xla")
_AT_HOME = ("accel.engines", "accel_launch")  # the launcher's flags and configuration files are documented


def check_engine_names(root: Path, modules: Iterable[Module]) -> list[str]:
    """Every identifier that names an engine outside of its folder is listed, and nothing else is.

    Args:
        root: The repository.
        modules: Its modules.
    """
    listed = _listed(root / LIST)
    found = {(module.name, name) for module in modules for name in _names(module)}
    problems = [
        f"{module}: {name} belongs to one engine: put it behind the seam (accel/engines/base.py)"
        for module, name in sorted(found - listed)
    ]
    gone = [
        f"{LIST}: {module} has no {name} any more: take the line out"
        for module, name in sorted(listed - found)
    ]
    return problems + gone


def check_engine_imports(modules: Iterable[Module]) -> list[str]:
    """No engine imports another one: what they share stands beside them.

    Args:
        modules: The modules of all packages.
    """
    return [
        f"{module.at(item.line)}: the engine {engine} imports the engine {other}: move what both need beside "
        "them"
        for module in modules
        if (engine := _engine_of(module.name))
        for item in module.imports
        if (other := _engine_of(item.module)) and other != engine
    ]


def _engine_of(module: str) -> str | None:
    """The engine that a module belongs to; None for what engines share."""
    name = module.removeprefix("accel.engines.").split(".")[0]
    return name if module.startswith("accel.engines.") and name in _ENGINES else None


def _listed(path: Path) -> set[tuple[str, str]]:
    if not path.exists():
        return set()
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {
        (module, name)
        for module, _, names in (line.partition(": ") for line in lines)
        for name in names.split()
    }


def _names(module: Module) -> Iterator[str]:
    if module.name.startswith(_AT_HOME):
        return
    with open(module.path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME and _ENGINE.search(token.string):
                yield token.string
