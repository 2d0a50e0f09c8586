"""Process groups that outlive their world: torch caches meshes, and each gloo group has a thread that polls.

A hundred of them keep a machine busy that does nothing.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["num_gloo_threads", "release_groups"]

_ROUNDS = 3  # collections: each one frees one more layer of a graph that C++ references
_kept = 0  # threads that were there after the last collection of everything


def release_groups() -> None:
    """Free the process groups of a world that was left, with all that keeps them."""
    global _kept
    gc.collect()
    if num_gloo_threads() <= _kept:  # a library keeps those: they are not looked for again
        return
    for clear in _caches():
        clear()
    for _ in range(_ROUNDS):
        gc.collect()
        if num_gloo_threads() <= _kept:
            return
    gc.unfreeze()  # what was alive when modules were frozen may lie in a cycle now
    gc.collect()
    gc.freeze()
    _kept = num_gloo_threads()


def num_gloo_threads() -> int:
    """Threads of this process that poll for a gloo group; 0 on systems that do not list them (not Linux)."""
    names = Path("/proc/self/task").glob("*/comm")
    return sum(_read(name).startswith("gloo_") for name in names)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""


def _caches() -> Iterator[Any]:
    """What clears torch's caches of shardings, in which meshes lie."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor"):
            continue
        for value in list(vars(module).values()):
            members = list(vars(value).values()) if isinstance(value, type) else []
            for item in (value, *members):
                function = getattr(item, "__func__", item)  # of a static method
                if isinstance(function, functools._lru_cache_wrapper):
                    yield function.cache_clear
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is not None and hasattr(redistribute, "_planner_cache"):
        yield redistribute._planner_cache.clear
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        yield debug._clear_python_sharding_prop_cache
        yield debug._clear_fast_path_sharding_prop_cache
