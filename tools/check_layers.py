"""Check what the packages import and say to install: layers, dependencies, torch-free modules, the seam of
engines, short files.

Run from anywhere: `python tools/check_layers.py [repository]`. Reads source only and imports none of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from repo_checks import declared, engine_names, hints, layers, limits, torch_free
from repo_checks.tree import Module, packages

__all__ = ["main", "problems"]


def problems(root: Path) -> list[str]:
    """Return everything that is wrong under `root`."""
    found = packages(root)
    if not found:
        return [f"{root}: no packages here"]
    modules = [module for package in found.values() for module in package.modules]
    tools = [Module(path.stem, path) for path in sorted((root / "tools").rglob("*.py"))]
    return [
        *layers.check_imports(found),
        *layers.check_ranges(found),
        *declared.check_third_party(found),
        *declared.check_examples(root, found),
        *hints.check_hints(root, found),
        *torch_free.check_torch_free(found),
        *engine_names.check_engine_names(root, modules),
        *engine_names.check_engine_imports(modules),
        *limits.check_environment(modules),
        *limits.check_sizes(modules),
        *limits.check_sizes(tools),
    ]


def main(arguments: list[str]) -> int:
    """Print the problems; return 1 if there are any."""
    found = problems(Path(arguments[0]) if arguments else Path(__file__).parents[1])
    for problem in found:
        print(problem)
    print(f"layers: {len(found)} problem(s)" if found else "layers: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
