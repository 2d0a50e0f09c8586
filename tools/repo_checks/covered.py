"""Which entries of a list the tests of a file cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["covering"]

_Test = TypeVar("_Test", bound=Callable[..., None])


def covering() -> tuple[set[str], Callable[..., Callable[[_Test], _Test]]]:
    """Make a decorator for the tests of one file.

    Returns:
        The entries that are covered, filled by the decorator; and the decorator, whose arguments are the
        entries that the test below it covers.
    """
    entries: set[str] = set()

    def covers(*covered: str) -> Callable[[_Test], _Test]:
        def note(test: _Test) -> _Test:
            entries.update(covered)
            return test

        return note

    return entries, covers
