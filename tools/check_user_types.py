"""Check that types carry through the public interface, with mypy and with pyright.

Both check `tools/user_types/right.py`, in which they may find nothing, and at `mistakes.py`, in which they
have to find an error in each line that ends with `# wrong`, and in no other one.

Run from anywhere: `python tools/check_user_types.py`, with the packages, mypy and basedpyright installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["main"]

_FOLDER = Path(__file__).parent / "user_types"


def _mypy(file: Path) -> dict[int, str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--show-absolute-path",
        str(file),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.finditer(rf"^{re.escape(str(file))}:(\d+): error: (.*)$", output, re.MULTILINE)
    return {int(match[1]): match[2] for match in found}


def _pyright(file: Path) -> dict[int, str]:
    command = ["basedpyright", "--level", "error", "--outputjson", str(file)]
    output = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_FOLDER).stdout
    found = json.loads(output)["generalDiagnostics"]
    return {item["range"]["start"]["line"] + 1: item["message"] for item in found}


_CHECKERS: dict[str, Callable[[Path], dict[int, str]]] = {"mypy": _mypy, "pyright": _pyright}


def main() -> int:
    """Print what a checker finds or misses; return 1 if there is anything."""
    problems = []
    for file in (_FOLDER / "right.py", _FOLDER / "mistakes.py"):
        lines = file.read_text().splitlines()
        wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
        for name, check in _CHECKERS.items():
            found = check(file)
            problems += [f"{file.name}:{line}: {name} finds nothing" for line in sorted(wrong - found.keys())]
            problems += [
                f"{file.name}:{line}: {name}: {message}"
                for line, message in sorted(found.items())
                if line not in wrong
            ]
    for problem in problems:
        print(problem)
    print(f"user types: {len(problems)} problem(s)" if problems else "user types: ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
