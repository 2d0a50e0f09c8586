"""Which packages are installed, and in which version; no package is imported to find out."""

from __future__ import annotations

import functools
import operator
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.version import Version

_OPERATIONS = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

# The packages of this repository that each one needs: pip looks for them on the public index otherwise.
_SIBLINGS = {
    "accel-state": (),
    "accel-ops": ("accel-state",),
    "accel-data": ("accel-state", "accel-ops"),
    "accel-optim": ("accel-state", "accel-ops"),
    "accel-ckpt": ("accel-state", "accel-ops"),
    "accel-launch": ("accel-state",),
    "accel": ("*",),
}


@functools.cache
def is_package_available(module: str) -> bool:
    """Return whether a module can be imported, without importing it.

    A folder without `__init__.py` does not count: many tools leave one named after themselves (`wandb/`,
    `aim/`) in the working folder.

    Args:
        module: Import name; of a dotted one the parents are imported.

    Returns:
        True if it is installed. The result is cached for the life of the process.
    """
    from importlib.util import find_spec

    # A loaded one needs no search; None blocks an import.
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        # Raises ValueError for a module without a spec, as in tests.
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    # Without an origin it is a namespace folder, not a package.
    return spec is not None and spec.origin is not None


def install_hint(extra: str | None, package: str = "accel") -> str:
    """The command that installs a package of this repository, or an extra of it, for an error message.

    It works from a checkout: the packages are not on the public index, where `accel` is another project.

    Args:
        extra: The extra; None for the package alone.
        package: The package of this repository.

    Returns:
        The command, and where to run it.
    """
    folders = [f"./packages/{name}" for name in _SIBLINGS[package]]
    if extra is not None:
        folders.append(f"'./packages/{package}[{extra}]'")
    elif _SIBLINGS[package] != ("*",):  # which includes the package
        folders.append(f"./packages/{package}")
    return f"pip install {' '.join(folders)} (in a checkout of accel)"


def require(module: str, extra: str, package: str = "accel") -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Import name.
        extra: The extra that installs it.
        package: The package that has this extra.

    Returns:
        The module.

    Raises:
        ImportError: If it is missing or fails to import; the message names the command that installs it.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        # Not installed, or installed but broken: the fixes differ.
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        state = "is not installed" if missing else f"cannot be imported ({error})"
        raise ImportError(
            f"{module} is needed here, but {state}. Install it with: {install_hint(extra, package)}",
            name=module,
        ) from error


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare the version of a library with another one.

    As in PEP 440, a local suffix such as `+cu126` is ignored unless the required version has one.

    Args:
        library_or_version: Name of an installed distribution, or a parsed version.
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        requirement_version: The version to compare with.

    Returns:
        The truth of `library_or_version operation requirement_version`.

    Raises:
        ValueError: If the operation or the version is invalid.
        importlib.metadata.PackageNotFoundError: If the library is not installed.
    """
    if operation not in _OPERATIONS:
        raise ValueError(f"{operation!r} is not a comparison; use one of {', '.join(_OPERATIONS)}.")
    if isinstance(library_or_version, str):
        return _compare_library(library_or_version, operation, requirement_version)
    return _compare(library_or_version, operation, requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version with another one, without importing torch.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.
        version: The version to compare with, e.g. `2.10.0`.

    Returns:
        The truth of `torch operation version`.

    Raises:
        ValueError: If the operation or the version is invalid.
    """
    return compare_versions("torch", operation, version)


@functools.cache
def _compare_library(library: str, operation: str, requirement: str) -> bool:
    # On first use: these imports take longer than the rest of this package without torch.
    from importlib.metadata import version

    from packaging.version import Version

    return _compare(Version(version(library)), operation, requirement)


def _compare(version: Version, operation: str, requirement: str) -> bool:
    from packaging.version import Version

    wanted = Version(requirement)
    # torch's builds are called 2.13.0+cpu, which is not later than 2.13.0.
    if wanted.local is None and version.local is not None:
        version = Version(version.public)
    compare: Any = _OPERATIONS[operation]
    return bool(compare(version, wanted))
