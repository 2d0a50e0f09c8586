"""Batch samplers that give one process its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accel_data.checks import check_divides, check_place
from accel_data.order.global_order import Order, SeedableRandomSampler, draw, order_of
from accel_data.order.layout import Layout, Share, StepRows, cut, spread_out
from accel_data.order.wrapper import BatchSamplerWrapper


class BatchSamplerShard(BatchSamplerWrapper):
    """Gives one process its part of the batches of a batch sampler.

    On two processes, batches [0, 1, 2, 3], [4, 5, 6, 7] give

    - without `split_batches`: [0, 1, 2, 3] to process 0 and [4, 5, 6, 7] to process 1;
    - with it: [0, 1] then [4, 5] to process 0 and [2, 3] then [6, 7] to process 1.

    Where the indices do not suffice for a batch on every process, the incomplete step is dropped if the batch
    sampler has drop_last, else completed with indices from the start, else (even_batches=False) left uneven.
    The share of a plain `BatchSampler` is computed, not found by walking over the batches of the others. A
    batch sampler of another class is walked. Its batches are never cut anew with even_batches=False or where
    it has no batch size; even_batches=True then completes the last step with its first batches.

    Args:
        batch_sampler: The batch sampler; any iterable of lists of indices.
        num_processes: Number of processes.
        process_index: Index of this one.
        split_batches: Give each process a piece of every batch, not every n-th batch.
        even_batches: Complete an incomplete last step with indices from the start.
        spread: Share out an incomplete last step as equally as can be where it is not completed, or where
            batches are split, and complete it with its own indices; as prepared loaders do.
        seed: Seeds the global generators while a sampler that may draw from them is walked; None for one that
            needs no seed.
        agreed: Called with the walk over a sampler of unknown order; see `order_of`.

    Raises:
        ValueError: If process_index is no process, if the batch size does not divide by num_processes with
            split_batches, or if there is none with split_batches.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        spread: bool = False,
        seed: int | None = None,
        agreed: Callable[[Callable[[], list[Any]]], list[Any]] | None = None,
    ) -> None:
        check_place(num_processes, process_index)
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.spread = spread
        self.seed = seed
        self.epoch = 0
        self.share = Share()  # of the latest pass
        self._agreed = agreed
        self.start = 0
        self._drawn_from: torch.Tensor | None = None
        self._check()

    @property
    def local_batch_size(self) -> int | None:
        """Indices in a full batch of one process; None if not known."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def step_size(self) -> int:
        """Places in the global order that one step of all processes takes.

        In samples; in batches where the batch size is not known.
        """
        return (self.batch_size or 1) * (1 if self.split_batches else self.num_processes)

    @property
    def has_length(self) -> bool:
        """Whether the number of batches is known before they are walked."""
        return hasattr(self.walked, "__len__")

    @property
    def num_samples(self) -> int | None:
        """Length of the global order in samples; None where only a walk gives it."""
        return len(self.sampler) if self._flat and self.has_length else None

    @property
    def num_real(self) -> int | None:
        """Samples in the global order that are no padding; None where only a walk gives it."""
        return self.num_samples

    @property
    def is_even(self) -> bool:
        """Whether every process gets as many batches, whatever the data."""
        return self.even_batches or (self.drop_last and (self._flat or not self.split_batches))

    @property
    def batches_of_each(self) -> tuple[int, ...] | None:
        """Number of batches of each process in the pass that has begun; None where only a walk gives it."""
        if not self.has_length:
            return None
        if self._flat:
            # Of the pass that has begun, which may be the rest of an epoch.
            layout, total = self._layout(self.start), len(self.sampler)
        elif self.split_batches:
            return None
        else:
            layout, total = self._layout_of_batches(self.start), self.total_length
        return layout.batches_of_each(total)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also for the samplers inside.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch
        super().set_epoch(epoch)

    @property
    def order_seed(self) -> int | None:
        """Seed of the order; None for one that has none."""
        sampler = self.sampler
        return sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else self.seed

    def set_seed(self, seed: int) -> None:
        """Choose the seed of the order.

        Args:
            seed: The seed.
        """
        if isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.set_seed(seed)
        else:
            self.seed = seed

    @property
    def is_keyed(self) -> bool:
        """Whether the order is computed from a key, see `SeedableRandomSampler`."""
        return isinstance(self.sampler, SeedableRandomSampler) and self.sampler.is_keyed

    def set_keyed(self, keyed: bool) -> None:
        """Choose whether the order is computed from a key, where it has a seed.

        Args:
            keyed: See `SeedableRandomSampler`.
        """
        if isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.set_keyed(keyed)

    def set_start(self, start: int, drawn_from: torch.Tensor | None = None) -> None:
        """Choose where the next passes start.

        Args:
            start: Place in the global order, in samples.
            drawn_from: State of the generator that their order is drawn from; None where seed or generator
                give the order.
        """
        self.start, self._drawn_from = start, drawn_from

    @contextmanager
    def override_even_batches(self, even_batches: bool) -> Iterator[None]:
        """Override `even_batches` inside of a `with` statement.

        Args:
            even_batches: Whether passes that begin inside complete an incomplete last step.
        """
        before, self.even_batches = self.even_batches, even_batches
        try:
            yield
        finally:
            self.even_batches = before

    def __len__(self) -> int:
        if self._flat:
            return self._layout(0).num_batches(len(self.sampler), self._rank)
        total = self.total_length
        if self.split_batches:
            return total
        return self._layout_of_batches(0).num_batches(total, self._rank)

    def __iter__(self) -> Iterator[list[int]]:
        self.share = Share()
        return self._batches(self.share, self.start)

    @property
    def _rank(self) -> int | None:
        return self.process_index

    @property
    def _flat(self) -> bool:
        # Only of torch's own __iter__ is it known that it cuts the indices of its sampler in order.
        return type(self.batch_sampler).__iter__ is BatchSampler.__iter__

    @property
    def walked(self) -> Any:
        """The sampler that gives the order: of indices, or of batches if only the batch sampler knows."""
        return self.sampler if self._flat else self.batch_sampler

    def _layout(self, start: int) -> Layout:
        share = self.local_batch_size
        assert share is not None
        # One process pads nothing, as a plain BatchSampler does not.
        even = self.even_batches and self.num_processes > 1
        # Whole batches are completed from the start of the order, as is documented for even_batches.
        spread = self.spread and (self.split_batches or not even)
        return Layout(share, self.num_processes, self.drop_last, even, start, spread)

    def _layout_of_batches(self, start: int) -> Layout:
        """How whole batches are dealt out."""
        first = start // (self.batch_size or 1)
        return Layout(1, self.num_processes, self.drop_last, self.even_batches, first)

    def _batches(self, share: Share, start: int) -> Iterator[list[int]]:
        # A generator, so that nothing is drawn before the loader has drawn its own seed, as without sharding.
        self._check()
        if self._flat:
            yield from cut(self._order(), self._layout(start), self._rank, share)
        elif self.even_batches and self.num_processes > 1 and self.batch_size is not None:
            yield from cut(self._flattened(self._order()), self._layout(start), self._rank, share)
        else:
            yield from self._whole_batches(self._order(), start, share)

    def _order(self) -> Any:
        # A state of torchdata holds what the whole order of its epoch is drawn from.
        if self._drawn_from is not None:
            generator = torch.Generator()
            generator.set_state(self._drawn_from)
            return draw(self.walked, generator)
        return order_of(self.walked, self.seed, self.epoch, self._agreed)

    def _flattened(self, batches: Any) -> Order:
        """Turn batches of the declared size into an order of indices."""
        size = self.batch_size

        def indices() -> Iterator[int]:
            # The length of a batch that was short: only the last one may be.
            short: int | None = None
            for number, batch in enumerate(batches):
                if short is not None or len(batch) > size:
                    seen = len(batch) if short is None else short
                    where = number if short is None else number - 1
                    raise ValueError(
                        f"{type(self.batch_sampler).__name__} says batch_size={size}, but its batch {where} "
                        f"has {seen} indices. Batches of varying size can only be shared out as they are: "
                        "pass even_batches=False."
                    )
                short = len(batch) if len(batch) < size else None
                yield from batch

        return indices() if isinstance(batches, Iterator) else list(indices())

    def _whole_batches(self, batches: Any, start: int, share: Share) -> Iterator[list[int]]:
        if self.split_batches and self.num_processes > 1:
            yield from self._divided(islice(batches, start // (self.batch_size or 1), None), share)
            return
        for piece in cut(batches, self._layout_of_batches(start), self._rank, share, count=len):
            yield from piece

    def _divided(self, batches: Iterable[list[int]], share: Share) -> Iterator[list[int]]:
        if self.has_length:
            # All at once, so that their number is known when the first one is handed out.
            batches = list(batches)
            share.num_batches = sum(bool(part) for batch in batches for part in self._pieces(batch))
            if batches and any(self._pieces(batches[-1])):
                sizes = self._piece_sizes(batches[-1])
                share.last = StepRows.of(sizes, sizes)
        for batch in batches:
            yield from filter(None, self._pieces(batch))

    def _pieces(self, batch: list[int]) -> list[list[int]]:
        """Return the piece of a batch that this process gets, or those of all."""
        sizes = self._piece_sizes(batch)
        pieces = [batch[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
        return pieces if self._rank is None else [pieces[self._rank]]

    def _piece_sizes(self, batch: list[int]) -> tuple[int, ...]:
        # Batch samplers of other classes give batches of any length, also shorter ones than there are
        # processes.
        if self.spread:
            return spread_out(len(batch), self.num_processes)
        size = self.local_batch_size
        assert size is not None
        return tuple(len(batch[rank * size : (rank + 1) * size]) for rank in range(self.num_processes))

    def _check(self) -> None:
        size = self.batch_size
        name = type(self.batch_sampler).__name__
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"batch_size must be a positive integer, but {name}.batch_size is {size!r}.")
        # One process takes any batches, so that it need not know their size.
        if self.num_processes == 1:
            return
        if self.split_batches and size is None:
            raise ValueError(
                f"split_batches=True needs a batch size, but {name} has none. Give it an attribute "
                "`batch_size`, or pass split_batches=False."
            )
        if self.split_batches:
            check_divides(size, self.num_processes)


class AllShards(BatchSamplerShard):
    """The batches of all processes, step by step: those of process 0, 1, ..., then the next step's."""

    @property
    def _rank(self) -> int | None:
        return None
