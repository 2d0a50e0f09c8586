"""Short digests of tensors, computed where they are."""

from __future__ import annotations

import torch

FACTOR = -7046029254386353131
"""2**64 / golden ratio, odd: its multiples are spread over all 64-bit integers."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 2**15  # elements with one sum: their integers fit into a core's cache
_ROWS_AT_ONCE = 64  # elsewhere than on the CPU, where starting an operation costs more than memory


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a dense tensor's elements as integers, in one dimension; complex numbers are two each."""
    plain = tensor.detach()
    parts = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return parts.contiguous().view(_INTEGERS[parts.element_size()]).flatten()


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """An integer that is another one where a bit or the order of a tensor's elements is another.

    It is the same on all devices, and NaN has one like any other number.

    Args:
        tensor: A dense tensor of any dtype; its shape and dtype do not count.

    Returns:
        An int64 tensor without dimensions, on the device of the tensor, which is not waited for.
    """
    numbers = as_integers(tensor)
    # Odd factors, so that no bit is lost; int64 wraps around alike on every device.
    places = torch.arange(1, min(_ROW, numbers.numel()) + 1, device=numbers.device) * FACTOR | 1
    while numbers.numel() > _ROW:
        numbers = _sums_of_rows(numbers, places)
    return _sum(numbers, places)


def _sums_of_rows(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    whole = numbers.numel() // _ROW
    rows = numbers[: whole * _ROW].view(whole, _ROW)
    at_once = 1 if numbers.device.type == "cpu" else _ROWS_AT_ONCE
    sums = [_sum(rows[start : start + at_once], places) for start in range(0, whole, at_once)]
    return torch.cat([*sums, _sum(numbers[whole * _ROW :], places).view(1)])


def _sum(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension of what mixes the bits of each element with its place."""
    mixed = numbers.long() * places[: numbers.shape[-1]]
    # Shifted onto itself: a sum of products would not see that the highest bits of two elements change.
    return (mixed ^ (mixed >> 29)).sum(dim=-1)
