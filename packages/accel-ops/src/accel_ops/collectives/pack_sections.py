"""Laying tensors end to end, and taking what comes back apart, in the fewest calls.

The cost of a small collective is that of the calls into torch. So what depends on shapes and dtypes alone is
worked out once and remembered, and what can be done for all tensors in one call is not done one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

SHARED_BYTES = 32 * 1024
"""Results that are together no larger than this (bytes) stay in one block of memory; others get their own.

Own memory costs an allocation and a copy for each tensor; shared memory stays as long as one of them does.
"""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""As what elements of a size (bytes) move: not every dtype can be indexed (float8 cannot)."""

_split_with_sizes_copy: Any = torch.split_with_sizes_copy  # torch's annotation says it returns nothing


@dataclass(frozen=True)
class Part:
    """The tensors of one dtype in a pack.

    They are laid end to end row by row where all have rows of one shape, which takes a single call; else
    element by element.

    Args:
        dtype: Their dtype.
        device: Where they are.
        positions: Which ones of all the tensors they are.
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
        """The shapes that come back: copies are put together along the first dimension."""
        if self.copies == 1:
            return [tuple(shape) for shape in self.shapes]
        return [(self.copies * shape[0], *shape[1:]) if shape else (self.copies,) for shape in self.shapes]

    @cached_property
    def order(self) -> torch.Tensor:
        """Where in all the copies the rows (else elements) of each tensor are, one tensor after the other."""
        place = torch.arange(sum(self.result_lengths), device=self.device).view(
            self.copies, sum(self.lengths)
        )
        return torch.cat([columns.reshape(-1) for columns in torch.split(place, self.lengths, 1)])

    def lay_out(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay the tensors of this part end to end.

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
    def laid_out_shape(self) -> tuple[int, ...]:
        """The shape of all that comes back, laid end to end."""
        return (sum(self.result_lengths), *(self.row_shape or ()))

    def take_apart(self, laid_out: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make the tensors that come back, of elements of which no other part of the program knows.

        Args:
            laid_out: A contiguous tensor of `laid_out_shape`.

        Returns:
            The tensors, as independent for autograd as if they had been made one by one.
        """
        if laid_out.nbytes <= SHARED_BYTES:
            # Unsafe means: pieces that autograd takes for independent, which they are, as nobody has the
            # whole.
            pieces: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(laid_out, self.result_lengths)
        else:
            pieces = _split_with_sizes_copy(laid_out, self.result_lengths)
        return pieces if self.row_shape is not None else self._in_shape(pieces)

    def write(self, tensors: Sequence[torch.Tensor], place: torch.Tensor) -> None:
        """Lay the tensors of this part end to end in a given place.

        Args:
            tensors: All the tensors that `plan` saw.
            place: What `place` returned.
        """
        if len(self.positions) == 1:
            place.copy_(tensors[self.positions[0]])
            return
        chosen = self._chosen(tensors)
        if self.row_shape is not None:
            torch.cat(chosen, out=place)  # type: ignore[arg-type]
        else:
            place.copy_(_flatten_dense_tensors(chosen))  # type: ignore[no-untyped-call]

    def place(self, buffer: torch.Tensor) -> torch.Tensor:
        """View bytes as what this part is laid out in.

        Args:
            buffer: A uint8 tensor of shape (*, self.nbytes), which may be a part of the rows of another one.

        Returns:
            A tensor of shape (*, sum(self.lengths), *self.row_shape) in the dtype of this part.
        """
        shape = (*buffer.shape[:-1], sum(self.lengths), *(self.row_shape or ()))
        # An empty buffer cannot be viewed as another dtype.
        if not self.nbytes:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return buffer.view(self.dtype).view(shape)

    def put_together(self, copies: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make the tensors that come back, of whole copies of this part.

        Args:
            copies: What `place` returned for a buffer of shape (self.copies, self.nbytes).

        Returns:
            The tensors, in memory of which no other part of the program knows.
        """
        if len(self.positions) == 1:
            # In place, as in `_in_shape`.
            return [copies.clone(memory_format=torch.contiguous_format).resize_(self.result_shapes[0])]
        # The only copy: each tensor's pieces go into memory of its own.
        if copies.nbytes > SHARED_BYTES:
            return self._in_shape(_split_with_sizes_copy(copies.flatten(1), self.sizes, 1))
        words = copies.view(WORDS[self.dtype.itemsize])  # of any dtype, also of those that cannot be indexed
        words = words.reshape(self.laid_out_shape)
        words = words.clone() if self.copies == 1 else words.index_select(0, self.order)
        return self.take_apart(words.view(self.dtype))

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
