"""The examples of a package's README, for the tests that run them as a reader does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["MOST_LINES", "examples", "num_lines", "run"]

MOST_LINES = 10  # of a README's first example, without imports' blank lines and comments on separate lines


def examples(test_file: str, language: str = "python") -> list[str]:
    """The code blocks of the README next to a package's tests.

    Args:
        test_file: The `__file__` of a test in the package's folder `tests`.
        language: Which blocks.
    """
    text = (Path(test_file).parents[1] / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def num_lines(example: str) -> int:
    """The lines of an example with code."""
    return sum(bool(line.strip()) and not line.startswith("#") for line in example.splitlines())


def run(example: str) -> dict[str, Any]:
    """Run an example as a script; returns its variables."""
    names = {"__name__": "__main__"}
    exec(compile(example, "README.md", "exec"), names)
    return names
