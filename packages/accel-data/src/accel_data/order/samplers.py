"""Batch samplers that yield the shard of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler

from accel_data.checks import check_divisible, check_rank
from accel_data.order.global_order import Order, SeedableRandomSampler, draw, order_of
from accel_data.order.layout import EpochInfo, Layout, StepRows, cut, split_evenly
from accel_data.order.wrapper import BatchSamplerWrapper


class BatchSamplerShard(BatchSamplerWrapper):
    """Yields the shard of one process of the batches of a batch sampler.

    On two processes, batches [0, 1, 2, 3], [4, 5, 6, 7] give

    - without `split_batches`: [0, 1, 2, 3] to process 0 and [4, 5, 6, 7] to process 1;
    - with it: [0, 1] then [4, 5] to process 0 and [2, 3] then [6, 7] to process 1.

    If there are not enough indices for a batch on every process, the incomplete step is dropped if the batch
    sampler has drop_last, else padded with indices from the start, or left uneven with even_batches=False.
    The shard of a plain `BatchSampler` is computed without iterating the batches of other processes. A batch
    sampler of another class is iterated. Its batches are never split with even_batches=False or if it has no
    batch size; even_batches=True then pads the last step with its first batches.

    Args:
        batch_sampler: The batch sampler; any iterable of lists of indices.
        num_processes: Number of processes.
        process_index: Index of this process.
        split_batches: Split every batch over the processes, instead of giving each process every n-th batch.
        even_batches: Pad an incomplete last step with indices from the start.
        balance_last_step: Split an incomplete last step as evenly as possible if it is not padded or if
            batches are split, and pad it with its own indices; as prepared loaders do.
        seed: Seeds the global generators while a sampler that may draw from them is iterated; None if it
            needs no seed.
        verify: Checks the order of a sampler of unknown type on all ranks; see `order_of`.

    Raises:
        ValueError: If process_index is out of range, if the batch size does not divide by num_processes with
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
        balance_last_step: bool = False,
        seed: int | None = None,
        verify: Callable[[Callable[[], list[Any]]], list[Any]] | None = None,
    ) -> None:
        check_rank(num_processes, process_index)
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.balance_last_step = balance_last_step
        self.seed = seed
        self.epoch = 0
        self.epoch_info = EpochInfo()  # of the latest iteration
        self._verify = verify
        self.start = 0
        self._generator_state: torch.Tensor | None = None
        self._check()

    @property
    def local_batch_size(self) -> int | None:
        """Indices in a full batch of one process; None if unknown."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def step_size(self) -> int:
        """Positions of one step over all processes.

        In samples; in batches if the batch size is unknown.
        """
        return (self.batch_size or 1) * (1 if self.split_batches else self.num_processes)

    @property
    def has_length(self) -> bool:
        """Whether the number of batches is known before iterating."""
        return hasattr(self.order_sampler, "__len__")

    @property
    def num_samples(self) -> int | None:
        """Length of the global order in samples; None if only iterating shows it."""
        return len(self.sampler) if self._is_plain_batch_sampler and self.has_length else None

    @property
    def num_real_samples(self) -> int | None:
        """Samples in the global order without padding; None if only iterating shows it."""
        return self.num_samples

    @property
    def is_even(self) -> bool:
        """Whether every process gets equally many batches, whatever the data."""
        return self.even_batches or (
            self.drop_last and (self._is_plain_batch_sampler or not self.split_batches)
        )

    @property
    def batches_per_rank(self) -> tuple[int, ...] | None:
        """Number of batches of each process in the current iteration; None if only iterating shows it."""
        if not self.has_length:
            return None
        if self._is_plain_batch_sampler:
            # Of the current iteration, which may be the rest of an epoch.
            layout, total = self._layout(self.start), len(self.sampler)
        elif self.split_batches:
            return None
        else:
            layout, total = self._layout_of_batches(self.start), self.total_length
        return layout.batches_per_rank(total)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also for the samplers inside.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch
        super().set_epoch(epoch)

    @property
    def order_seed(self) -> int | None:
        """Seed of the order; None if it has none."""
        sampler = self.sampler
        return sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else self.seed

    def set_seed(self, seed: int) -> None:
        """Set the seed of the order.

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
        """Set whether the order is computed from a key, if it has a seed.

        Args:
            keyed: See `SeedableRandomSampler`.
        """
        if isinstance(self.sampler, SeedableRandomSampler):
            self.sampler.set_keyed(keyed)

    def set_start(self, start: int, generator_state: torch.Tensor | None = None) -> None:
        """Set where the next iterations start.

        Args:
            start: Position in the global order, in samples.
            generator_state: State of the generator that their order is drawn from; None if seed or generator
                determine the order.
        """
        self.start, self._generator_state = start, generator_state

    @contextmanager
    def override_even_batches(self, even_batches: bool) -> Iterator[None]:
        """Override `even_batches` inside a `with` statement.

        Args:
            even_batches: Whether iterations that begin inside pad an incomplete last step.
        """
        previous, self.even_batches = self.even_batches, even_batches
        try:
            yield
        finally:
            self.even_batches = previous

    def __len__(self) -> int:
        if self._is_plain_batch_sampler:
            return self._layout(0).num_batches(len(self.sampler), self._rank)
        total = self.total_length
        if self.split_batches:
            return total
        return self._layout_of_batches(0).num_batches(total, self._rank)

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch_info = EpochInfo()
        return self._batches(self.epoch_info, self.start)

    @property
    def _rank(self) -> int | None:
        return self.process_index

    @property
    def _is_plain_batch_sampler(self) -> bool:
        # Only torch's __iter__ is known to slice the indices of its sampler in order.
        return type(self.batch_sampler).__iter__ is BatchSampler.__iter__

    @property
    def order_sampler(self) -> Any:
        """The sampler that gives the order: of indices, or of batches if only the batch sampler knows it."""
        return self.sampler if self._is_plain_batch_sampler else self.batch_sampler

    def _layout(self, start: int) -> Layout:
        per_rank_batch = self.local_batch_size
        assert per_rank_batch is not None
        # A single process pads nothing, as a plain BatchSampler.
        even = self.even_batches and self.num_processes > 1
        # Unsplit batches are padded from the start of the order, as documented for even_batches.
        balance_last_step = self.balance_last_step and (self.split_batches or not even)
        return Layout(per_rank_batch, self.num_processes, self.drop_last, even, start, balance_last_step)

    def _layout_of_batches(self, start: int) -> Layout:
        """The layout of an order of batches."""
        first = start // (self.batch_size or 1)
        return Layout(1, self.num_processes, self.drop_last, self.even_batches, first)

    def _batches(self, info: EpochInfo, start: int) -> Iterator[list[int]]:
        # A generator, so that nothing is drawn before the loader has drawn its seed, as without sharding.
        self._check()
        if self._is_plain_batch_sampler:
            yield from cut(self._order(), self._layout(start), self._rank, info)
        elif self.even_batches and self.num_processes > 1 and self.batch_size is not None:
            yield from cut(self._flatten(self._order()), self._layout(start), self._rank, info)
        else:
            yield from self._batches_as_they_are(self._order(), start, info)

    def _order(self) -> Any:
        # A state of torchdata holds the generator state from which the order of its epoch is drawn.
        if self._generator_state is not None:
            generator = torch.Generator()
            generator.set_state(self._generator_state)
            return draw(self.order_sampler, generator)
        return order_of(self.order_sampler, self.seed, self.epoch, self._verify)

    def _flatten(self, batches: Any) -> Order:
        """Turn batches of the declared size into an order of indices."""
        size = self.batch_size

        def indices() -> Iterator[int]:
            # The length of a short batch: only the last one may be short.
            short: int | None = None
            for number, batch in enumerate(batches):
                if short is not None or len(batch) > size:
                    seen = len(batch) if short is None else short
                    where = number if short is None else number - 1
                    raise ValueError(
                        f"{type(self.batch_sampler).__name__} says batch_size={size}, but its batch {where} "
                        f"has {seen} indices. Batches of varying size cannot be split: pass "
                        "even_batches=False."
                    )
                short = len(batch) if len(batch) < size else None
                yield from batch

        return indices() if isinstance(batches, Iterator) else list(indices())

    def _batches_as_they_are(self, batches: Any, start: int, info: EpochInfo) -> Iterator[list[int]]:
        if self.split_batches and self.num_processes > 1:
            yield from self._split_batches_of_any_size(
                islice(batches, start // (self.batch_size or 1), None), info
            )
            return
        for piece in cut(batches, self._layout_of_batches(start), self._rank, info, count=len):
            yield from piece

    def _split_batches_of_any_size(
        self, batches: Iterable[list[int]], info: EpochInfo
    ) -> Iterator[list[int]]:
        if self.has_length:
            # All at once, so that their number is known when the first one is yielded.
            batches = list(batches)
            info.num_batches = sum(bool(piece) for batch in batches for piece in self._pieces(batch))
            if batches and any(self._pieces(batches[-1])):
                sizes = self._piece_sizes(batches[-1])
                info.last_rows = StepRows.of(sizes, sizes)
        for batch in batches:
            yield from filter(None, self._pieces(batch))

    def _pieces(self, batch: list[int]) -> list[list[int]]:
        """Return the piece of a batch for this process, or those of all processes."""
        sizes = self._piece_sizes(batch)
        pieces = [batch[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
        return pieces if self._rank is None else [pieces[self._rank]]

    def _piece_sizes(self, batch: list[int]) -> tuple[int, ...]:
        # Batch samplers of other classes yield batches of any length, even with fewer indices than processes.
        if self.balance_last_step:
            return split_evenly(len(batch), self.num_processes)
        size = self.local_batch_size
        assert size is not None
        return tuple(len(batch[rank * size : (rank + 1) * size]) for rank in range(self.num_processes))

    def _check(self) -> None:
        size = self.batch_size
        name = type(self.batch_sampler).__name__
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"batch_size must be a positive integer, but {name}.batch_size is {size!r}.")
        # A single process takes any batches, of unknown size too.
        if self.num_processes == 1:
            return
        if self.split_batches and size is None:
            raise ValueError(
                f"split_batches=True needs a batch size, but {name} has none. Give it an attribute "
                "`batch_size`, or pass split_batches=False."
            )
        if self.split_batches:
            check_divisible(size, self.num_processes)


class AllShards(BatchSamplerShard):
    """The batches of all processes, step by step: those of process 0, 1, ..., then the next step's."""

    @property
    def _rank(self) -> int | None:
        return None
