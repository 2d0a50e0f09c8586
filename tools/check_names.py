"""Check that public names have docstrings, no name has a banned word, and the glossary's terms exist.

Run from anywhere: `python tools/check_names.py [repository]`, with the packages installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from repo_checks.names import check_names, public_modules
from repo_checks.tree import packages
from repo_checks.words import banned_words, check_local_words, check_terms, check_words

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Print the problems; return 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1]
    found = packages(root)
    modules = list(public_modules(found))
    problems = check_names(modules) if modules else ["no packages here"]
    glossary = root / "docs" / "glossary.md"
    if glossary.exists():
        text = glossary.read_text()
        banned = banned_words(text)
        problems += check_terms(text, root) + check_words(modules, banned)
        problems += check_local_words(
            (module for package in found.values() for module in package.modules), banned
        )
    for problem in problems:
        print(problem)
    print(f"names: {len(problems)} problem(s)" if problems else f"names: ok ({len(modules)} modules)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
