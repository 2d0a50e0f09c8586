"""Short digests of tensors, computed on their device."""

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
    reals = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return reals.contiguous().view(_INTEGERS[reals.element_size()]).flatten()


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """An integer hash of a tensor's bits and of the order of its elements.

    It is the same on all devices; NaNs are hashed like any other value.

    Args:
        tensor: A dense tensor of any dtype; its shape and dtype are ignored.

    Returns:
        An int64 tensor without dimensions, on the device of the tensor, without synchronization.
    """
    numbers = as_integers(tensor)
    # Odd factors, so that no bit is lost; int64 wraps around in the same way on every device.
    places = torch.arange(1, min(_ROW, numbers.numel()) + 1, device=numbers.device) * FACTOR | 1
    while numbers.numel() > _ROW:
        numbers = _sums_of_rows(numbers, places)
    return _sum(numbers, places)


def _sums_of_rows(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    num_rows = numbers.numel() // _ROW
    rows = numbers[: num_rows * _ROW].view(num_rows, _ROW)
    at_once = 1 if numbers.device.type == "cpu" else _ROWS_AT_ONCE
    sums = [_sum(rows[start : start + at_once], places) for start in range(0, num_rows, at_once)]
    return torch.cat([*sums, _sum(numbers[num_rows * _ROW :], places).view(1)])


def _sum(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of each element's bits mixed with its position."""
    mixed = numbers.long() * places[: numbers.shape[-1]]
    # XOR with a shift: a sum of products would miss a change of the highest bits of two elements.
    return (mixed ^ (mixed >> 29)).sum(dim=-1)
