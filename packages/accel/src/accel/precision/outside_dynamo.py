"""Functions that compiled models call, and that are no part of compiled graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def call_outside_dynamo(function: Callable[..., None], *args: Any) -> None:
    """Call a function that changes a model or reads files; a compiler does not look into it.

    Args:
        function: A function of a module, or of a class: one that is the same in all calls.
        *args: Its arguments.
    """
    # Importing the compiler takes a second, which models that are not compiled need not wait for.
    if "torch._dynamo" not in sys.modules:
        function(*args)
        return
    if function not in _untraced:
        _untraced[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    _untraced[function](*args)


# Not functools.cache, of which the compiler warns.
_untraced: dict[Callable[..., None], Callable[..., None]] = {}

# What torch.compiler.disable sets, without the import: a graph ends here.
call_outside_dynamo._torchdynamo_disable = True  # type: ignore[attr-defined]
