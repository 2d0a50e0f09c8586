"""What is documented and not built yet: it raises, by name, instead of pretending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["not_yet"]


def not_yet(name: str) -> Callable[..., Any]:
    """A callable in the place of `name` that raises NotImplementedError naming it."""

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is documented and not there yet in this version of accel.")

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    missing.__doc__ = f"Not there yet: raises NotImplementedError naming {name}."
    missing.__dict__["__not_yet__"] = True
    return missing
