"""What the recorder of `accel verify` replaces by name, in its own process and until its end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def replace_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Call `wrapper(original, *args, **kwargs)` in place of a function; returns a function that undoes it.

    Args:
        owner: A module or class.
        name: The function's name there.
        wrapper: What is called in its place.
    """
    original = getattr(owner, name)
    is_defined_here = name in vars(owner)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    if is_defined_here:
        return functools.partial(setattr, owner, name, original)
    return functools.partial(delattr, owner, name)


def switch_off(keyword: str, position: int) -> Callable[..., Any]:
    """A wrapper that calls a function of torch without its dropout.

    Args:
        keyword: The function's argument for the probability.
        position: Its place among the positional arguments.
    """

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            return original(*args[:position], 0.0, *args[position + 1 :], **kwargs)
        return original(*args, **{**kwargs, keyword: 0.0})

    return call
