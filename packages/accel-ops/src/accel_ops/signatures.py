"""Signatures of functions, as every version of Python finds them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, as `inspect.signature` does, whatever its annotations name.

    Python 3.14 evaluates annotations when they are first read. Those of a user's `forward` may then name what
    is imported for type checkers alone, and `inspect.signature` would raise NameError.

    Args:
        function: The function or method.

    Raises:
        TypeError: If it is not callable.
        ValueError: If it has no signature that Python can find, as some functions written in C.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)
