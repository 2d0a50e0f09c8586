"""Gathering tensors of one shape and dtype, such as a step's metrics: one stack, in the fewest calls.

After a collective the processor's caches hold other things, and each further function costs many times what
it costs in a loop. So the memory of a stack is kept, with all views of it that a gather needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

import torch

from accel_ops.collectives.pack_sections import SHARED_BYTES, WORDS

_dtype = attrgetter("dtype")


class Buffers(NamedTuple):
    """Send and receive memory of stacks.

    Args:
        stack: The stack of this process, of shape (number of tensors, *shape).
        sent: Its bytes: a uint8 tensor of shape (nbytes,).
        received: The bytes of all stacks, one after the other: of shape (copies * nbytes,).
        rows: The rows of all stacks (elements of 0-dimensional tensors), as words of their size.
    """

    stack: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Kind:
    """Number, shape, dtype and device of the tensors of a stack.

    Args:
        number: How many there are.
        shape: The shape of each.
        dtype: Their dtype.
        device: Where they are.
        copies: How many stacks come back.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    copies: int
    _kept: list[Buffers] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def lengths(self) -> list[int]:
        """How many rows each tensor has that comes back."""
        return [self.copies * (self.shape[0] if self.shape else 1)] * self.number

    @cached_property
    def order(self) -> torch.Tensor:
        """Where in all stacks the rows of each tensor are, one tensor after the other."""
        index = torch.arange(sum(self.lengths), device=self.device)
        return index.view(self.copies, self.number, -1).transpose(0, 1).flatten()

    def buffers(self) -> Buffers:
        """Return unused buffers: those passed to `keep`, or new ones."""
        try:
            return self._kept.pop()  # one call, so that two threads never get the same ones
        except IndexError:
            with torch.inference_mode(False):  # buffers made inside it could not be written outside
                return self._make_buffers()

    def keep(self, buffers: Buffers) -> None:
        """Keep buffers for the next time. Nothing reads or writes them any more."""
        if self.device.type == "cpu":  # on other devices a stream may still use them
            self._kept[:] = [buffers]

    def _make_buffers(self) -> Buffers:
        stack = torch.empty((self.number, *self.shape), dtype=self.dtype, device=self.device)
        received = torch.empty(self.copies * stack.nbytes, dtype=torch.uint8, device=self.device)
        words = received.view(WORDS[self.dtype.itemsize])
        rows = words.view(sum(self.lengths), *self.shape[1:])
        return Buffers(stack, stack.view(-1).view(torch.uint8), received, rows)


class Stack(NamedTuple):
    """Tensors of one kind, stacked.

    Args:
        kind: Their kind.
        buffers: Their memory, which `finish` returns to the kind.
    """

    kind: Kind
    buffers: Buffers

    def make_results(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Make the tensors that come back, without their values: while the stacks are in flight.

        Returns:
            The memory of all of them, for `finish`, and as many tensors as the stack has: each with its
            copies, concatenated along the first dimension. Nothing else may write to the memory.
        """
        kind = self.kind
        memory = torch.empty_like(self.buffers.rows)
        rows = memory if memory.dtype is kind.dtype else memory.view(kind.dtype)
        # Unsafe: autograd treats the pieces as independent, which they are: nothing else uses the memory.
        return memory, torch.unsafe_split_with_sizes(rows, kind.lengths)

    def finish(self, memory: torch.Tensor) -> None:
        """Fill the results once all stacks have been received, and return the buffers to the kind.

        Args:
            memory: What `make_results` returned first.
        """
        torch.index_select(self.buffers.rows, 0, self.kind.order, out=memory)
        self.kind.keep(self.buffers)


def stack_if_uniform(tensors: Sequence[torch.Tensor], copies: int) -> Stack | None:
    """Stack the tensors if they are small and all of one kind: the common case.

    Args:
        tensors: The tensors.
        copies: How many stacks come back.

    Returns:
        The stack; None if what comes back has more than SHARED_BYTES or no bytes at all, or if the tensors
        differ in dtype, shape or device; or, while gradients are recorded, if only one between the first and
        the last requires them.
    """
    if not tensors:
        return None
    first = tensors[0]
    nbytes = first.nbytes * len(tensors) * copies
    if not 0 < nbytes <= SHARED_BYTES or first.is_quantized or len(set(map(_dtype, tensors))) > 1:
        return None
    # As logits and labels differ: an exception of torch costs as much as all of this.
    if first.shape != tensors[-1].shape:
        return None
    if (first.requires_grad or tensors[-1].requires_grad) and torch.is_grad_enabled():
        # Only then, as the context costs a hundredth of a gather.
        with torch.no_grad():
            return stack_if_uniform(tensors, copies)
    kind = _kind(len(tensors), first.shape, first.dtype, first.device, copies)
    buffers = kind.buffers()
    try:
        torch.stack(tensors, out=buffers.stack)  # type: ignore[arg-type]
    except RuntimeError:  # one between has another shape or device, or a gradient
        return None
    return Stack(kind, buffers)


# A loop gathers the same few trees again and again.
@lru_cache(maxsize=32)
def _kind(number: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, copies: int) -> Kind:
    return Kind(number, shape, dtype, device, copies)
