"""Concatenating tensors, and splitting the results, in the fewest calls.

The cost of a small collective is that of the calls into torch. So what depends on shapes and dtypes alone is
computed once and cached, and tensors are handled in one call rather than one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

SHARED_BYTES = 32 * 1024
"""Results with a total size up to this (bytes) share one block of memory; larger ones get separate memory.

Separate memory costs an allocation and a copy per tensor; shared memory lives as long as one of them does.
"""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The dtype in which elements of a size (bytes) are indexed: not every dtype can be (float8 cannot)."""

_split_with_sizes_copy: Any = torch.split_with_sizes_copy  # torch's annotation says it returns nothing


@dataclass(frozen=True)
class Section:
    """The tensors of one dtype in a pack.

    They are concatenated row by row if all have rows of one shape, which takes a single call; else
    element by element.

    Args:
        dtype: Their dtype.
        device: Where they are.
        positions: Their indices among all the tensors.
        shapes: Their shapes.
        copies: How many of each come back (one from every process if they are gathered).
    """

    dtype: torch.dtype
    device: torch.device
    positions: Sequence[int]
    shapes: Sequence[torch.Size]
    copies: int

    @cached_property
    def nbytes(self) -> int:
        """Their size, once."""
        return sum(self.sizes) * self.dtype.itemsize

    @cached_property
    def sizes(self) -> list[int]:
        """Their numbers of elements."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def row_shape(self) -> torch.Size | None:
        """The shape of their rows, if it is one."""
        # None for tensors without dimensions, which have no rows.
        rows = {shape[1:] if shape else None for shape in self.shapes}
        return rows.pop() if len(rows) == 1 else None

    @cached_property
    def lengths(self) -> list[int]:
        """Their numbers of rows, else of elements."""
        return self.sizes if self.row_shape is None else [shape[0] for shape in self.shapes]

    @cached_property
    def result_lengths(self) -> list[int]:
        """The numbers of rows, else of elements, that come back."""
        return [self.copies * length for length in self.lengths]

    @cached_property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results: copies are concatenated along the first dimension."""
        if self.copies == 1:
            return [tuple(shape) for shape in self.shapes]
        return [(self.copies * shape[0], *shape[1:]) if shape else (self.copies,) for shape in self.shapes]

    @cached_property
    def order(self) -> torch.Tensor:
        """The indices in all the copies of each tensor's rows (else elements), one tensor after the other."""
        index = torch.arange(sum(self.result_lengths), device=self.device).view(
            self.copies, sum(self.lengths)
        )
        return torch.cat([columns.reshape(-1) for columns in torch.split(index, self.lengths, 1)])

    def flatten_tensors(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the tensors of this section.

        Args:
            tensors: All the tensors that `plan` saw.

        Returns:
            Their elements. It may share memory with the tensor if there is one only.
        """
        chosen = self._chosen(tensors)
        if self.row_shape is not None:
            return torch.cat(chosen)  # type: ignore[arg-type]
        # Private, but what DDP has always made its buckets with: any shapes in one call.
        return _flatten_dense_tensors(chosen)  # type: ignore[no-untyped-call,no-any-return]

    @cached_property
    def flat_shape(self) -> tuple[int, ...]:
        """The shape of the concatenated results."""
        return (sum(self.result_lengths), *(self.row_shape or ()))

    def split_copies(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split concatenated results, which nothing else uses, into tensors.

        Args:
            flat: A contiguous tensor of `flat_shape`.

        Returns:
            The tensors, as independent for autograd as if they had been made one by one.
        """
        if flat.nbytes <= SHARED_BYTES:
            # Unsafe: autograd treats the pieces as independent, which they are, as nothing else uses the
            # full tensor.
            pieces: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(flat, self.result_lengths)
        else:
            pieces = _split_with_sizes_copy(flat, self.result_lengths)
        return pieces if self.row_shape is not None else self._in_shape(pieces)

    def write(self, tensors: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Concatenate the tensors of this section into a view.

        Args:
            tensors: All the tensors that `plan` saw.
            target: What `view_in` returned.
        """
        if len(self.positions) == 1:
            target.copy_(tensors[self.positions[0]])
            return
        chosen = self._chosen(tensors)
        if self.row_shape is not None:
            torch.cat(chosen, out=target)  # type: ignore[arg-type]
        else:
            target.copy_(_flatten_dense_tensors(chosen))  # type: ignore[no-untyped-call]

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """View bytes as the concatenated tensors of this section.

        Args:
            buffer: A uint8 tensor of shape (*, self.nbytes), which may be a slice of another buffer's rows.

        Returns:
            A tensor of shape (*, sum(self.lengths), *self.row_shape) in the dtype of this section.
        """
        shape = (*buffer.shape[:-1], sum(self.lengths), *(self.row_shape or ()))
        # An empty buffer cannot be viewed as another dtype.
        if not self.nbytes:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return buffer.view(self.dtype).view(shape)

    def concatenate_copies(self, copies: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make the results from all copies of this section.

        Args:
            copies: What `view_in` returned for a buffer of shape (self.copies, self.nbytes).

        Returns:
            The tensors, in memory that nothing else uses.
        """
        if len(self.positions) == 1:
            # In place, as in `_in_shape`.
            return [copies.clone(memory_format=torch.contiguous_format).resize_(self.result_shapes[0])]
        # The only copy: each tensor's pieces go into separate memory.
        if copies.nbytes > SHARED_BYTES:
            return self._in_shape(_split_with_sizes_copy(copies.flatten(1), self.sizes, 1))
        words = copies.view(WORDS[self.dtype.itemsize])  # of any dtype, also of those that cannot be indexed
        words = words.reshape(self.flat_shape)
        words = words.clone() if self.copies == 1 else words.index_select(0, self.order)
        return self.split_copies(words.view(self.dtype))

    def _chosen(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(tensors) == len(self.positions):
            return tensors
        return [tensors[i] for i in self.positions]

    def _in_shape(self, pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # In place, because a view would cost three times as much and be a view for autograd.
        shaped = zip(pieces, self.result_shapes, strict=True)
        return [piece.resize_(*shape) if shape else piece.resize_(()) for piece, shape in shaped]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a 1-dimensional uint8 tensor; it is copied only where it is not contiguous."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element is contiguous with any stride, which would stay.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
