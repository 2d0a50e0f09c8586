"""Import every module of a package where it is installed alone; run by `release.isolated` there.

The arguments are the package, those that belong to it and its dependencies, and all of the repository, each a
list with commas.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import walk_packages

package, declared, siblings = sys.argv[1:]
here = Path(sys.prefix)
there = {each.name.replace("-", "_") for each in metadata.distributions()} & set(siblings.split(","))
if there != set(declared.split(",")):
    sys.exit(f"of our packages {sorted(there)} are installed, but {declared} are declared")

names = [package, *(each.name for each in walk_packages(import_module(package).__path__, f"{package}."))]
for name in names:
    if not name.endswith("__main__"):
        module = import_module(name)
        if not Path(str(module.__file__)).is_relative_to(here):
            sys.exit(f"{name} was imported from {module.__file__}, which is not in {here}")
