"""Build every package, inspect what was built, and install each alone into an empty environment.

Run by `hatch run wheels:test`; `--build` builds only. Needs hatchling, twine and uv, and the package index
for what the packages depend on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from release.build import build, sdist_name, wheel_name
from release.contents import check_sdist, check_wheel
from release.isolated import check_alone
from repo_checks.tree import packages

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Print the problems; return 1 if there are any."""
    root = Path(__file__).parents[1]
    found, dist = packages(root), root / "dist"
    build(found.values(), dist)
    if arguments == ["--build"]:
        return 0
    problems = []
    for package in found.values():
        problems += check_wheel(dist / wheel_name(package), package)
        problems += check_sdist(dist / sdist_name(package), package)
    # Fields, and whether an index can show the description.
    twine = [sys.executable, "-m", "twine", "check", "--strict", *sorted(map(str, dist.iterdir()))]
    run = subprocess.run(twine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        problems.append(run.stdout)
    with tempfile.TemporaryDirectory() as folder:
        problems += check_alone(found, dist, Path(folder))
    for problem in problems:
        print(problem)
    print(f"wheels: {len(problems)} problem(s)" if problems else f"wheels: ok ({len(found)} packages)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
