"""Calling functions from compiled models without tracing them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def call_outside_dynamo(function: Callable[..., None], *args: Any) -> None:
    """Call a function that changes a model or reads files, without tracing it.

    Args:
        function: A module-level function or a method of a class: the same object in all calls.
        *args: Its arguments.
    """
    # Importing the compiler takes a second, which uncompiled models do not need.
    if "torch._dynamo" not in sys.modules:
        function(*args)
        return
    if function not in _disabled:
        _disabled[function] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    _disabled[function](*args)


# Not functools.cache: the compiler warns of it.
_disabled: dict[Callable[..., None], Callable[..., None]] = {}

# What torch.compiler.disable sets, without the import: a graph break.
call_outside_dynamo._torchdynamo_disable = True  # type: ignore[attr-defined]
