"""Names of single engines stay in `accel/engines`; what is documented elsewhere is in a list that shrinks."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from repo_checks.tree import Module

__all__ = ["LIST", "check_engine_names"]

LIST = Path("tools/reference/engine_names.txt")
_ENGINE = re.compile(r"deepspeed|megatron|ulysses|fsdp|(^|_)ddp|zero3", re.IGNORECASE)
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
        f"{module}: {name} belongs to one engine: put it behind the seam (accel/engines/base)"
        for module, name in sorted(found - listed)
    ]
    gone = [
        f"{LIST}: {module} has no {name} any more: take the line out"
        for module, name in sorted(listed - found)
    ]
    return problems + gone


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
