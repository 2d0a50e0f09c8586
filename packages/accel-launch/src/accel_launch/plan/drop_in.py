"""The environment in which Python programs that import accelerate run on accel."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from accel_launch.errors import LaunchError
from accel_state import env
from accel_state.imports.packages import install_hint


def drop_in_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the switch of `accel.drop_in` on.

    Every Python started in it runs a file of accel's first, found through PYTHONPATH, and finds the commands
    of accelerate on the PATH.

    Args:
        environ: The environment to start from.

    Returns:
        A new environment; the same again for one in which the switch is on.

    Raises:
        LaunchError: If accel is not installed.
    """
    # Found, and not imported: accel is above the launcher.
    spec = find_spec("accel")
    found = () if spec is None else spec.submodule_search_locations or ()
    places = [Path(place, "drop_in") for place in found]
    # Another project has the same name on the public index.
    folder = next((place for place in places if (place / "startup" / "sitecustomize.py").is_file()), None)
    if folder is None:
        raise LaunchError(
            f"--drop_in needs the package accel, which {sys.executable} does not find. Install it with: "
            f"{install_hint(None, 'accel')}."
        )
    changed = dict(environ)
    changed["PYTHONPATH"] = _first(folder / "startup", environ.get("PYTHONPATH", ""))
    changed["PATH"] = _first(folder / "bin", environ.get("PATH", os.defpath))
    env.put(changed, "ACCEL_DROP_IN", True)
    env.put(changed, "ACCEL_DROP_IN_PYTHON", sys.executable)
    return changed


def _first(folder: Path, path: str) -> str:
    """Put a folder at the beginning of a search path."""
    # Empty entries stay: on the PATH they are the current folder.
    others = [entry for entry in path.split(os.pathsep) if entry != str(folder)] if path else []
    return os.pathsep.join([str(folder), *others])
