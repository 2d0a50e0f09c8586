"""Run the functions `check_*` of a program, and print the tracebacks of those that failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping


def run(names: Mapping[str, Callable[[], None]]) -> None:
    """Run the checks among a program's names; exit with 1 if one failed."""
    checks = [value for name, value in names.items() if name.startswith("check_")]
    passed = sum(_passes(check) for check in checks)
    print(f"{passed} of {len(checks)} passed")
    sys.exit(passed < len(checks))


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        print(f"{check.__name__}:\n{traceback.format_exc()}", file=sys.stderr)
        return False
    return True
