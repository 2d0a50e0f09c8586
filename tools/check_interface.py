"""Check accel against the documented interface and against what well-known clients import.

Every documented module, name, signature, default and enum member exists, or its name is listed in
tools/reference/missing.txt. That list only shrinks: a name that is there now must leave it (`--update` takes
it out), and no name can be added to it. What is there does more than raise NotImplementedError.

Run from anywhere: `python tools/check_interface.py [--update]`, with the packages installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from repo_checks.documented import Entry, api_entries, client_entries, is_missing, mismatches

__all__ = ["check", "main", "read_list", "write_list"]

REFERENCE = Path(__file__).parent / "reference"
HEADER = (
    "# Documented names that are not there yet. This list only shrinks: tools/check_interface.py --update"
)


def check(entries: Iterable[Entry], listed: set[str]) -> tuple[list[str], set[str]]:
    """Compare the entries with the code and with the list of what is missing.

    Returns:
        The problems, and the names that are missing.
    """
    documented = set()
    missing = set()
    problems = []
    for entry in entries:
        documented.add(entry.name)
        if is_missing(entry):
            missing.add(entry.name)
        else:
            problems += mismatches(entry)
    problems += [f"{name}: documented, but neither exists nor is listed" for name in sorted(missing - listed)]
    problems += [f"{name}: exists now; run with --update" for name in sorted((listed & documented) - missing)]
    problems += [f"{name}: listed, but not a documented name" for name in sorted(listed - documented)]
    return problems, missing


def read_list(path: Path) -> set[str]:
    """Read the names of a list, without comments and empty lines."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def write_list(path: Path, names: set[str]) -> None:
    """Write the names, sorted."""
    path.write_text("\n".join([HEADER, *sorted(names)]) + "\n")


def main(arguments: list[str], reference: Path = REFERENCE) -> int:
    """Print the problems; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--update", action="store_true", help="take out of the list what is there now")
    update = parser.parse_args(arguments).update
    entries = [
        *api_entries(json.loads((reference / "api.json").read_text())),
        *client_entries((reference / "client-imports.txt").read_text()),
    ]
    path = reference / "missing.txt"
    listed = read_list(path)
    problems, missing = check(entries, listed)
    if update:
        write_list(path, listed & missing)
        problems, missing = check(entries, listed & missing)
    for problem in sorted(set(problems)):
        print(problem)
    names = {entry.name for entry in entries}
    print(f"interface: {len(names) - len(missing)} of {len(names)} documented names are there")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
