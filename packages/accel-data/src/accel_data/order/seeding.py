"""Agreement of the processes before an epoch: on a seed, and on the order of an unknown sampler."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accel_data.checks import check_length
from accel_data.order.global_order import SeedableRandomSampler, sampler_generator
from accel_data.order.mixing import mix_seed
from accel_ops.collectives.objects import broadcast_object_list, gather_object
from accel_ops.rng import seed_count

_prepared: WeakKeyDictionary[object, tuple[int, Counter[bool]]] = WeakKeyDictionary()
"""Per owner: the last `set_seed`, and the loaders since then whose order (True) or samples got a seed."""


def reset_seeding(owner: object) -> None:
    """Seed the next loaders of an owner as its first ones, as after `set_seed`.

    Args:
        owner: See `Seeding`.
    """
    _prepared.pop(owner, None)


@dataclass(frozen=True)
class Seeding:
    """How a loader's order gets its seed.

    Args:
        use_seedable_sampler: Also replace random samplers that have a generator of the user's.
        data_seed: The seed; None to derive one from torch's.
        several: Whether several processes must agree.
        owner: The gradient state of the Accelerator that prepares the loader; None without one.
        order: See `DataLoaderConfiguration`.
    """

    use_seedable_sampler: bool
    data_seed: int | None
    several: bool
    owner: object | None
    order: str | None = None

    def seeded(self, batch_sampler: Any) -> tuple[Any, int | None]:
        """Make the order of a random batch sampler a function of seed and epoch.

        Args:
            batch_sampler: Any batch sampler. It is not changed.

        Returns:
            The batch sampler, or a copy with a seedable sampler inside; and the seed of the generators under
            which it is to be walked, None where it needs none.
        """
        # A batch sampler with an __iter__ of its own may use its sampler in any way, or not at all.
        flat = type(batch_sampler).__iter__ is BatchSampler.__iter__
        sampler = batch_sampler.sampler if flat else batch_sampler
        if isinstance(sampler, SequentialSampler) and type(sampler).__iter__ is SequentialSampler.__iter__:
            check_length(sampler.data_source)
            return batch_sampler, None
        new = self._seedable(sampler)
        if new is not None:
            if self.order is not None:
                new.set_keyed(self.order == "keyed")
            changed = copy.copy(batch_sampler)
            changed.sampler = new
            return changed, None
        if sampler_generator(batch_sampler) is not None or isinstance(sampler, (list, tuple, range)):
            return batch_sampler, None
        return batch_sampler, self._shared(self.data_seed)

    def _seedable(self, sampler: Any) -> SeedableRandomSampler | None:
        """Return what takes the place of a random sampler; None for one that stays."""
        if isinstance(sampler, SeedableRandomSampler):
            new = copy.copy(sampler)
            new.set_seed(self._shared(sampler.initial_seed))
            return new
        if not isinstance(sampler, RandomSampler) or type(sampler).__iter__ is not RandomSampler.__iter__:
            return None
        generator = sampler.generator
        if generator is not None and not self.use_seedable_sampler:
            return None
        seed = self.data_seed
        if seed is None and generator is not None:
            seed = generator.initial_seed()
        elif seed is None and self.use_seedable_sampler:
            seed = torch.initial_seed()  # and no place of the loader: the order is accelerate's then
        # None follows a dataset whose length changes, as the sampler that is replaced would.
        wanted = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        return SeedableRandomSampler(
            sampler.data_source, sampler.replacement, wanted, data_seed=self._shared(seed)
        )

    def for_samples(self) -> int:
        """Return what the seeds of single samples are made of, for a loader whose order has no seed."""
        return self._shared(self.data_seed, of_order=False)

    def _shared(self, seed: int | None, of_order: bool = True) -> int:
        """Return the seed of process 0; this process's where there is no process group.

        By default it comes from torch's initial seed, so that `torch.manual_seed` (or `set_seed`) makes a run
        repeatable on any number of processes, and from the place of the loader among those of its owner since
        the last `set_seed`, so that two loaders over one dataset differ. Nothing is drawn from any generator.
        """
        if seed is None:
            place = 0
            if self.owner is not None:
                # Other trials in one program must not change the order.
                latest = seed_count()
                known, counts = _prepared.get(self.owner, (latest, Counter()))
                if known != latest:
                    counts = Counter()
                _prepared[self.owner] = latest, counts
                place = counts[of_order]
                counts[of_order] += 1
            # The complement, so that the two kinds of seeds never come from one place of one stream.
            root = torch.initial_seed() if of_order else ~torch.initial_seed()
            seed = mix_seed(root, place) >> 1  # fits into a signed 64-bit integer
        # A seed that the user gives is the same on all processes already.
        if not self.several or self.data_seed is not None or not dist.is_initialized():
            return seed
        seeds = [seed]
        broadcast_object_list(seeds)
        return seeds[0]


def agreed_order(walk: Callable[[], list[Any]]) -> list[Any]:
    """Walk over a sampler on every process, and make sure that all have got the same.

    Args:
        walk: Returns what the sampler gives.

    Returns:
        Its result.

    Raises:
        RuntimeError: On every process, if the orders differ or one process could not walk.
    """
    if not dist.is_initialized():
        return walk()
    error: Exception | None = None
    entries: list[Any] = []
    # Whatever goes wrong is kept until all have exchanged: the others wait there for this process.
    try:
        entries = walk()
        # A checksum, as an order may have millions of entries.
        summary = f"{len(entries)} entries, checksum {zlib.crc32(pickle.dumps(entries)):08x}"
    except Exception as raised:
        error = raised
        summary = f"{type(raised).__name__}: {raised}"
    summaries = gather_object([summary])
    if error is not None:
        raise error
    if len(set(summaries)) > 1:
        seen = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(summaries))
        raise RuntimeError(
            f"The sampler does not give the same order on every process ({seen}), so samples would be lost "
            "and others repeated. Let it draw from a torch.Generator in an attribute `generator`, from "
            "torch's, Python's or numpy's global generator, or seed it from set_epoch."
        )
    return entries
