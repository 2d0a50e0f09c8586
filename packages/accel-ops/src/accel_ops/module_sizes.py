"""The memory that the tensors of a model take, in bytes: per module, and of its largest layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import accumulate

import torch

from accel_ops.module_tensors import named_module_tensors, read_dtype
from accel_state.enums import CustomDtype

Dtype = str | torch.dtype | CustomDtype

# torch has no dtypes for these, and counts a bool as a byte; sizes here are those of packed weights.
_BITS = {CustomDtype.FP8: 8, CustomDtype.INT4: 4, CustomDtype.INT2: 2, torch.bool: 1}


def dtype_byte_size(dtype: Dtype) -> float:
    """Return the bytes that one element takes, as it is counted for placing a model.

    Args:
        dtype: A dtype of torch, a `CustomDtype`, or the name of one.

    Returns:
        The bytes; a fraction for less than one, with 1/8 for `torch.bool`.

    Raises:
        ValueError: If there is no such dtype.

    Example:
        >>> dtype_byte_size(torch.float32)
        4
        >>> dtype_byte_size(CustomDtype.INT4)
        0.5
    """
    if isinstance(dtype, str) and dtype in CustomDtype.__members__.values():
        dtype = CustomDtype(dtype)
    known_dtype = dtype if isinstance(dtype, CustomDtype) else read_dtype(dtype)
    if known_dtype is None:
        raise ValueError(f"dtype must be a dtype of torch, a CustomDtype, or the name of one, not {dtype!r}.")
    return _byte_size(known_dtype)


@cache
def _byte_size(dtype: torch.dtype | CustomDtype) -> float:
    small = re.fullmatch(r"torch\.u?int([1-7])", str(dtype))  # torch gives these an itemsize of 1
    bits = int(small[1]) if small else _BITS.get(dtype)
    if bits is None:
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize
    return bits // 8 if bits % 8 == 0 else bits / 8


def size_function(
    dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> Callable[[str, torch.Tensor], float]:
    """Return a function that computes the size of a tensor, as it is counted for placing a model.

    Args:
        dtype: What weights will be converted to. Tensors of integers and booleans, and weights that are
            smaller now, keep their size.
        special_dtypes: What single tensors will be converted to, by their full names.

    Returns:
        A function of the full name and the tensor that returns bytes.

    Raises:
        ValueError: If there is no such dtype.
    """
    limit = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(override) for name, override in (special_dtypes or {}).items()}

    def size_of(name: str, tensor: torch.Tensor) -> float:
        size = special.get(name)
        if size is None:
            size = _byte_size(tensor.dtype)
            if limit is not None and (tensor.is_floating_point() or tensor.is_complex()):
                size = min(size, limit)
        return tensor.numel() * size

    return size_of


def tensor_sizes(
    model: torch.nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Return the sizes of a model's tensors; a shared one comes once.

    Args:
        model: The model; it may be on the meta device.
        dtype: What weights will be converted to, as in `size_function`.
        special_dtypes: What single tensors will be converted to, by their full names.

    Yields:
        Full name, tensor, and size in bytes.

    Raises:
        ValueError: If there is no such dtype.
    """
    size_of = size_function(dtype, special_dtypes)
    for name, tensor in named_module_tensors(model, recurse=True):
        yield name, tensor, size_of(name, tensor)


def compute_module_sizes(
    model: torch.nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the size of each module and tensor of a model.

    Args:
        model: The model; it may be on the meta device.
        dtype: What weights will be converted to, as in `tensor_sizes`.
        special_dtypes: What single tensors will be converted to, by their full names.
        buffers_only: Count buffers alone.

    Returns:
        Bytes by full name, with "" for the full model and 0 for an unknown name. A tied weight
        counts once, under its first name.

    Raises:
        ValueError: If there is no such dtype.

    Example:
        >>> compute_module_sizes(torch.nn.Sequential(torch.nn.Linear(2, 3)))["0"]
        36
    """
    sizes: dict[str, float] = defaultdict(int)
    for name, tensor, size in tensor_sizes(model, dtype, special_dtypes):
        if buffers_only and isinstance(tensor, torch.nn.Parameter):
            continue
        # The model itself, then each module on the way to the tensor.
        for place in ("", *accumulate(name.split("."), "{}.{}".format)):
            sizes[place] += size
    return sizes


def compute_module_total_buffer_size(
    model: torch.nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> float:
    """Return the size of all buffers of a model, in bytes.

    Args:
        model: The model; it may be on the meta device.
        dtype: What weights will be converted to, as in `tensor_sizes`.
        special_dtypes: What single tensors will be converted to, by their full names.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Collection[tuple[str, torch.nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, float],
    no_split_module_classes: str | Collection[str] | None,
) -> tuple[float, list[str]]:
    """Find the largest layer: a module without children, or one of a class that is not split.

    Args:
        modules: Modules to look into, or single tensors, by full name.
        module_sizes: Bytes by full name, as `compute_module_sizes` returns them.
        no_split_module_classes: Names of classes whose modules are layers.

    Returns:
        Its bytes, and the names of all layers of that size.
    """
    unsplit_classes = (
        {no_split_module_classes} if isinstance(no_split_module_classes, str) else no_split_module_classes
    )
    layers = [layer for name, module in modules for layer in _layers(name, module, unsplit_classes or ())]
    sizes = {name: module_sizes.get(name, 0) for name in layers}
    largest = max(sizes.values(), default=0)
    return largest, [name for name, size in sizes.items() if size == largest]


def _layers(
    name: str, module: torch.nn.Module | torch.Tensor, unsplit_classes: Collection[str]
) -> Iterator[str]:
    children: list[tuple[str, torch.nn.Module]] = []
    if isinstance(module, torch.nn.Module) and type(module).__name__ not in unsplit_classes:
        children = list(module.named_children())
    if not children:
        yield name
    for child_name, child in children:
        yield from _layers(f"{name}.{child_name}" if name else child_name, child, unsplit_classes)


def calculate_maximum_sizes(model: torch.nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Return the size of a model and of its largest layer, where models of transformers name their layers.

    Args:
        model: The model; it may be on the meta device. Classes in its `_no_split_modules` are layers.

    Returns:
        Bytes of the model; and of the largest layer, with the names of all layers of that size.

    Example:
        >>> calculate_maximum_sizes(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 1)))
        (48, (36, ['0']))
    """
    sizes = compute_module_sizes(model)
    # An attribute of transformers' models: classes with connections that must not cross devices.
    unsplit_classes = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(
        list(model.named_children()) or [("", model)], sizes, unsplit_classes
    )
