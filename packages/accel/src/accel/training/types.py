"""Types of the Accelerator's arguments, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec, Protocol, SupportsIndex, TypeAlias, TypeVar, Union

import torch

_Item = TypeVar("_Item", covariant=True)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Decorator(Protocol):
    """Decorates a function that some processes run; on the others it returns None."""

    def __call__(self, function: Callable[_P, _R], /) -> Callable[_P, _R | None]:
        """Return the decorated function."""


class EngineSettings(Protocol):
    """Settings of an engine that another package adds; `engine` is the name of its entry point."""

    engine: ClassVar[str]


class HasStep(Protocol):
    """A learning rate scheduler: one of torch, or any object that steps."""

    @property
    def step(self) -> Callable[..., Any]:
        """Its method, with whatever arguments."""


class _ListOf(Protocol[_Item]):
    # A list; of its type only what reads, so that a list of tensors is a list of trees (and a str is none).
    def pop(self, index: SupportsIndex = ..., /) -> _Item: ...


TensorTree: TypeAlias = Union[
    torch.Tensor, "tuple[TensorTree, ...]", "_ListOf[TensorTree]", "Mapping[Any, TensorTree]"
]
"""Nested lists, tuples and dicts of tensors."""

Tree = TypeVar("Tree", bound=TensorTree)
