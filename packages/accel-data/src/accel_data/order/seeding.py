"""Makes all ranks use the same seed, and checks that unknown samplers give the same order on all ranks."""

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

_loader_counts: WeakKeyDictionary[object, tuple[int, Counter[bool]]] = WeakKeyDictionary()
"""Per gradient state: the last `set_seed`, and the number of loaders since then with a seeded order (True) or
seeded samples (False)."""


def reset_seeding(gradient_state: object) -> None:
    """Seed the next loaders of an Accelerator like its first ones, as after `set_seed`.

    Args:
        gradient_state: See `Seeding`.
    """
    _loader_counts.pop(gradient_state, None)


@dataclass(frozen=True)
class Seeding:
    """How the order of a loader is seeded.

    Args:
        use_seedable_sampler: Also replace random samplers with a user's generator.
        data_seed: The seed; None to derive one from torch's.
        is_distributed: Whether several processes must have the same seed.
        gradient_state: The gradient state of the Accelerator that prepares the loader; None without one.
        order: See `DataLoaderConfiguration`.
    """

    use_seedable_sampler: bool
    data_seed: int | None
    is_distributed: bool
    gradient_state: object | None
    order: str | None = None

    def make_seedable(self, batch_sampler: Any) -> tuple[Any, int | None]:
        """Make the order of a random batch sampler a function of seed and epoch.

        Args:
            batch_sampler: Any batch sampler. It is not changed.

        Returns:
            The batch sampler, or a copy with a seedable sampler inside; and the seed of the global generators
            while it is iterated, None if it needs none.
        """
        # A batch sampler with its own __iter__ may use its sampler in any way, or not at all.
        is_plain = type(batch_sampler).__iter__ is BatchSampler.__iter__
        sampler = batch_sampler.sampler if is_plain else batch_sampler
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
        return batch_sampler, self._shared_seed(self.data_seed)

    def _seedable(self, sampler: Any) -> SeedableRandomSampler | None:
        """Return the replacement of a random sampler; None to keep it."""
        if isinstance(sampler, SeedableRandomSampler):
            new = copy.copy(sampler)
            new.set_seed(self._shared_seed(sampler.initial_seed))
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
            seed = torch.initial_seed()  # not the number of the loader: this gives accelerate's order
        # None follows a dataset whose length changes, as the original sampler would.
        wanted = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        return SeedableRandomSampler(
            sampler.data_source, sampler.replacement, wanted, data_seed=self._shared_seed(seed)
        )

    def sample_seed_root(self) -> int:
        """Return the seed from which those of single samples are derived, if the order has no seed."""
        return self._shared_seed(self.data_seed, for_order=False)

    def _shared_seed(self, seed: int | None, for_order: bool = True) -> int:
        """Return the seed of process 0; that of this process without a process group.

        By default it comes from torch's initial seed, so that `torch.manual_seed` (or `set_seed`) makes a run
        repeatable on any number of processes, and from the number of loaders that this Accelerator has
        prepared since the last `set_seed`, so that two loaders over one dataset differ. Nothing is drawn from
        any generator.
        """
        if seed is None:
            number = 0
            if self.gradient_state is not None:
                # Earlier trials in one program must not change the order.
                seeded_times = seed_count()
                last_seeded, counts = _loader_counts.get(self.gradient_state, (seeded_times, Counter()))
                if last_seeded != seeded_times:
                    counts = Counter()
                _loader_counts[self.gradient_state] = seeded_times, counts
                number = counts[for_order]
                counts[for_order] += 1
            # The complement, so that the two kinds of seeds never collide.
            root = torch.initial_seed() if for_order else ~torch.initial_seed()
            seed = mix_seed(root, number) >> 1  # fits into a signed 64-bit integer
        # A seed that the user passes is already the same on all ranks.
        if not self.is_distributed or self.data_seed is not None or not dist.is_initialized():
            return seed
        seeds = [seed]
        broadcast_object_list(seeds)
        return seeds[0]


def walk_and_verify(walk: Callable[[], list[Any]]) -> list[Any]:
    """Iterate a sampler on every rank, and check that all ranks get the same order.

    Args:
        walk: Returns the entries of the sampler.

    Returns:
        Its result.

    Raises:
        RuntimeError: On every rank, if the orders differ or one rank failed.
    """
    if not dist.is_initialized():
        return walk()
    failure: Exception | None = None
    entries: list[Any] = []
    # Keep an error until after the exchange: the other ranks wait there for this one.
    try:
        entries = walk()
        # A checksum, since an order may have millions of entries.
        summary = f"{len(entries)} entries, checksum {zlib.crc32(pickle.dumps(entries)):08x}"
    except Exception as raised:
        failure = raised
        summary = f"{type(raised).__name__}: {raised}"
    summaries = gather_object([summary])
    if failure is not None:
        raise failure
    if len(set(summaries)) > 1:
        seen = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(summaries))
        raise RuntimeError(
            f"The sampler does not give the same order on every process ({seen}), so samples would be lost "
            "and others repeated. Make it draw from a torch.Generator in an attribute `generator`, from "
            "torch's, Python's or numpy's global generator, or seed it from set_epoch."
        )
    return entries
