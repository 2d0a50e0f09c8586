"""Attaching to the objects of a run, and detaching again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Undo", "put"]

Undo = Callable[[], None]
"""Takes off what was attached."""


def put(owner: Any, name: str, function: Callable[..., Any]) -> Undo:
    """Put a function in the place of an object's method; returns what takes it off.

    Args:
        owner: The object; its class stays as it is.
        name: The method's name.
        function: What is called in its place.
    """
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, function)

    def undo() -> None:
        # What was put around it since stays, and goes on to call it.
        if vars(owner).get(name) is not function:
            return
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return undo
