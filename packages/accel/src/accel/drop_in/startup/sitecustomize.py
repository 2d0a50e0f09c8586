"""Every Python that has this folder on its PYTHONPATH runs this file: the switch, passed on to children."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_HERE = Path(__file__).parent


def _switch_on() -> None:
    spec = find_spec("accel")
    places = [] if spec is None else spec.submodule_search_locations or ()
    # Another Python may inherit the variables, without accel or with another project of that name.
    if any(Path(place, "drop_in").is_dir() for place in places):
        from accel.drop_in import finder
        from accel_state import env

        if env.get("ACCEL_DROP_IN") and not finder.is_active():
            finder.install()


def _run_hidden() -> None:
    """Run the sitecustomize of the environment, which this one hides."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# Of use to the import of this file alone.
sys.path[:] = [place for place in sys.path if Path(place) != _HERE]
_switch_on()
_run_hidden()
