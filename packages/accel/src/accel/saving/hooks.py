"""Functions of the user's that `save_state` and `load_state` call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle


def register(hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    """Add a hook to those of a run; returns the handle that removes it."""
    # torch's handle removes the hook from this very dictionary, by its id.
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
