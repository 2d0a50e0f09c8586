"""Results in full precision: conversion of half-precision outputs, and a wrapper that applies it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from accel_ops.trees.walk import recursively_apply


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the fp16 and bf16 tensors of a tree to fp32.

    Args:
        tensor: A tree of tensors; tensors of other dtypes and other leaves are kept.

    Returns:
        The converted tree.
    """
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)


class ConvertOutputsToFp32:
    """A function whose half-precision outputs are converted to fp32.

    An instance of a class, not a closure, so that a wrapped module-level function can be pickled. It
    carries the name, the docstring and the signature of the function, which is kept in `__wrapped__`.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        # Also the signature: trainers drop the columns of a dataset that a forward does not take.
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and convert what it returns."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # a method, where it decorates one

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the copied attributes, which are made again from the function.
        return type(self), (self.model_forward,)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function (a model's forward) so that its fp16 and bf16 outputs become fp32.

    Args:
        model_forward: The function.

    Returns:
        A function of the same signature, which can be pickled where `model_forward` can. The original
        is its `__wrapped__`.
    """
    return ConvertOutputsToFp32(model_forward)
