"""Attaching to the objects of a run, and detaching again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

Undo = Callable[[], None]
"""Takes off what was attached."""


def put(owner: Any, name: str, function: Callable[..., Any]) -> Undo:
    """Replace an object's method by a function; returns a function that undoes it.

    Args:
        owner: The object; its class stays as it is.
        name: The method's name.
        function: What is called in its place.
    """
    # The instance's own: another observer may have put a function there.
    before = vars(owner).get(name)
    setattr(owner, name, function)
    # Weakly, so that nothing here keeps what `free_memory` is to free. The owner has the function, and that
    # the one before.
    held, placed = ref(owner), ref(function)
    earlier = None if before is None else ref(before)

    def undo() -> None:
        owner, function = held(), placed()
        # A wrapper that was put there since stays, and goes on to call it.
        if owner is None or function is None or vars(owner).get(name) is not function:
            return
        if earlier is None:
            delattr(owner, name)
        else:
            setattr(owner, name, earlier())

    return undo


def follow(loader: Any, handed_on: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> Undo:
    """Follow the batches of a prepared loader; returns what ends that.

    `iter` looks at the class alone, so that the loader gets a class of its own. Its copies without the first
    batches have it too.

    Args:
        loader: The loader.
        handed_on: Called with the loader that is iterated and its batches; what it yields is handed out.
    """
    kind = type(loader)
    is_on = True

    def iterate(self: Any) -> Iterator[Any]:
        batches = kind.__iter__(self)
        try:
            yield from handed_on(self, batches) if is_on else batches
        finally:
            if hasattr(batches, "close"):  # a generator, which ends its pass there
                batches.close()

    names = {"__iter__": iterate, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = type(kind.__name__, (kind,), names)
    loader.__class__ = own
    held = ref(loader)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        loader = held()
        if type(loader) is own:
            loader.__class__ = kind

    return undo
