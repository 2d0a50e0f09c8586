"""Import every module of a package where it is installed alone; run by `release.alone` there."""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from pathlib import Path

asked = json.loads(sys.argv[1])
here = Path(sys.prefix)
distributions = {each.name.replace("-", "_") for each in metadata.distributions()}
installed = sorted(distributions & set(asked["siblings"]))
if installed != sorted(asked["installed"]):
    sys.exit(f"of our packages {installed} are installed, and {sorted(asked['installed'])} are declared")

for name in asked["modules"]:
    module = import_module(name)
    if not Path(str(module.__file__)).is_relative_to(here):
        sys.exit(f"{name} was imported from {module.__file__}, which is not in {here}")
