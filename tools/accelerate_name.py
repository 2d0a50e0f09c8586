"""A pytest plugin (`-p accelerate_name`): in this process, accelerate is accel.

Libraries that import accelerate, ask whether it is installed, or compare its version, find accel under that
name. An installed accelerate is never imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["VERSION", "AccelAsAccelerate", "AccelDistribution"]

# The release whose documented interface accel has; clients compare it.
VERSION = "1.12.0"


class AccelDistribution(importlib.metadata.Distribution):
    """What `importlib.metadata` knows about the package accelerate."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata, and no other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: accelerate\nVersion: {VERSION}\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Return the path as it is: there are no files."""
        return path


class AccelAsAccelerate(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds accelerate and its modules: each is the module of accel with the same path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find accelerate, and nothing else."""
        if fullname.partition(".")[0] != "accelerate":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of accel in its place; the top one differs in its version alone."""
        name = module.__name__
        real = importlib.import_module(f"accel{name.removeprefix('accelerate')}")
        if name == "accelerate":
            vars(module).update(__version__=VERSION, __getattr__=lambda wanted: getattr(real, wanted))
        else:
            sys.modules[name] = real

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """Find the package accelerate."""
        return [AccelDistribution()] if context.name in (None, "accelerate") else []


sys.meta_path.insert(0, AccelAsAccelerate())
