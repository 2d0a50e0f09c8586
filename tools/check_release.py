"""Say whether versions, ranges between the packages, changelogs and the files in dist/ agree.

Run by `hatch run release:check`, which builds dist/ before.
"""

from __future__ import annotations

import sys
from pathlib import Path

from release.agreement import check_changelog, check_dist, check_ranges, check_versions, entry_of
from repo_checks.tree import packages

__all__ = ["main", "problems"]


def problems(root: Path) -> list[str]:
    """Return everything that does not agree under `root`."""
    found = packages(root)
    if not found:
        return [f"{root}: no packages here"]
    wrong = check_versions(found)
    # What follows compares with the versions.
    if wrong:
        return wrong
    changelogs = [problem for package in found.values() for problem in check_changelog(package)]
    return [*check_ranges(found), *changelogs, *check_dist(found, root / "dist")]


def main(arguments: list[str]) -> int:
    """Print the problems, or each package's version and its newest entry; return 1 if there are problems."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    wrong = problems(root)
    for problem in wrong:
        print(problem)
    if not wrong:
        for package in packages(root).values():
            print(f"{package.folder.name} {package.version}, newest changes under: {entry_of(package)}")
    print(f"release: {len(wrong)} problem(s)" if wrong else "release: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
