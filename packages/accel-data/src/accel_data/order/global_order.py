"""The global order: which dataset index is at which position of an epoch.

- An order is a function of (seed, epoch, position), independent of the number of processes and workers.
- It is a range, one tensor, a list, or computed from a key, so that a rank can slice out its shard without
  iterating the rest.
- Samplers that draw from the global random generators are iterated under isolated generators.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from accel_data.order.mixing import mix_seed
from accel_data.order.permutation import KeyedPermutation

Order = range | torch.Tensor | KeyedPermutation | list[Any] | Iterator[Any]
"""Random access (all but an iterator), or an iterator if the sampler has no length."""

KEYED_FROM = 2**27
"""From this dataset length on, shuffled orders are computed from a key by default."""

_CHUNK = 1024  # entries taken at once from a sampler without a length
_SURELY_FINITE = 100_000  # entries that are listed from a sampler of any length
_LISTED_AT_MOST = 2**28  # entries of a sampler: a list of as many integers takes 10 GB
_BLOCK = 8192  # entries of an order converted to a list at once


def draw(sampler: RandomSampler, generator: torch.Generator, same_stream: bool = False) -> torch.Tensor:
    """Draw the order of a `RandomSampler` as one tensor.

    Args:
        sampler: Has the length of the dataset, the number of samples to draw, and whether with replacement.
        generator: The generator to draw from.
        same_stream: Leave the generator in the state after a complete iteration over `sampler`, which draws
            one more permutation than it needs.

    Returns:
        Indices of shape (num_samples,); int32 if the dataset is short enough, to halve the memory.
    """
    length, wanted, device = len(sampler.data_source), sampler.num_samples, generator.device
    dtype = torch.int32 if length < 2**31 else torch.int64
    if sampler.replacement:
        return torch.randint(length, (wanted,), generator=generator, dtype=dtype, device=device).cpu()
    # torch draws complete permutations, one after the other, and truncates the last one.
    rounds = wanted // length + (1 if same_stream or wanted % length else 0)
    drawn = [
        torch.randperm(length, generator=generator, dtype=dtype, device=device).cpu() for _ in range(rounds)
    ]
    return drawn[0][:wanted] if wanted <= length else torch.cat(drawn)[:wanted]


def default_device_of(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Make torch draw on the device of a generator, whatever the default device is.

    Args:
        generator: The generator; None for the global one of the CPU.

    Returns:
        A context manager.
    """
    device = torch.device("cpu") if generator is None else generator.device
    return nullcontext() if torch.get_default_device().type == device.type else device


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of its seed and the epoch.

    A complete iteration advances it to the next epoch; `set_epoch` sets one.

    Args:
        *args: Those of `torch.utils.data.RandomSampler`.
        data_seed: The seed. By default the initial seed of `generator`, else of torch.
        keyed: Whether orders are computed position by position, by a `KeyedPermutation`, rather than drawn at
            once by `torch.randperm`; by default for datasets of at least `KEYED_FROM` samples.
        **kwargs: Those of `torch.utils.data.RandomSampler`.
    """

    def __init__(
        self, *args: Any, data_seed: int | None = None, keyed: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self._keyed = keyed
        if data_seed is None:
            data_seed = torch.initial_seed() if self.generator is None else self.generator.initial_seed()
        self.initial_seed = data_seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = epoch

    def set_seed(self, seed: int) -> None:
        """Set the seed.

        Args:
            seed: The seed.
        """
        self.initial_seed = seed

    @property
    def is_keyed(self) -> bool:
        """Whether orders are computed from a key. Samples that may repeat are always drawn at once."""
        length = len(self.data_source)
        if self.replacement or self.num_samples > length:
            return False
        return length >= KEYED_FROM if self._keyed is None else self._keyed

    def set_keyed(self, keyed: bool) -> None:
        """Set whether orders are computed from a key.

        Args:
            keyed: See the class.
        """
        self._keyed = keyed

    def order(self) -> torch.Tensor | KeyedPermutation:
        """Return the order of the current epoch: a tensor of shape (num_samples,), or what computes it."""
        if self.is_keyed:
            key = mix_seed(self.initial_seed, self.epoch)
            return KeyedPermutation(len(self.data_source), key, self.num_samples)
        return draw(self, self.generator_of(self.epoch))

    def generator_of(self, epoch: int) -> torch.Generator:
        """Return the generator from which the order of an epoch is drawn.

        Args:
            epoch: Its number. It is added to the seed, as accelerate and `DistributedSampler` do: with the
                same seed the order is the same.
        """
        return torch.Generator().manual_seed((self.initial_seed + epoch) % 2**64)

    def __iter__(self) -> Iterator[int]:
        yield from walk(self.order())
        self.set_epoch(self.epoch + 1)


class IsolatedRNG:
    """Isolates the global random generators (torch on the CPU, random, and numpy if imported).

    Inside `with`, they are seeded with `seed`; afterwards they are as if nothing had been drawn. When entered
    again, it continues where it stopped.

    Args:
        seed: The 64-bit seed.

    Attributes:
        times_entered: How often any instance was entered in this process.
    """

    times_entered = 0

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._unwrapped: list[Any] = []
        self._outside: list[Any] = []

    def __enter__(self) -> IsolatedRNG:
        # Read-ahead checks whether reading used the global generators: states alone do not show it.
        IsolatedRNG.times_entered += 1
        self._outside = global_states()
        if self._seed is not None:
            for _, _, reseed in _global_rngs():
                reseed(self._seed)
            self._seed = None
        else:
            _set_all(self._unwrapped)
        return self

    def __exit__(self, *exc: object) -> None:
        self._unwrapped = global_states()
        _set_all(self._outside)


def order_of(
    sampler: Iterable[Any],
    seed: int | None,
    epoch: int,
    verify: Callable[[Callable[[], list[Any]]], list[Any]] | None = None,
) -> Order:
    """Return the order in which a sampler visits a dataset in one epoch.

    Args:
        sampler: Any sampler; a batch sampler gives an order of batches.
        seed: With `epoch`, seeds the global generators while a sampler that may draw from them is iterated;
            None leaves them as they are.
        epoch: Number of the epoch.
        verify: Called with a function that lists the entries of a sampler of unknown type; returns its
            result, or raises on all ranks if they differ.

    Returns:
        A range, a tensor or a permutation for the samplers that allow it; else a list of the entries, or an
        iterator if the sampler has no length.
    """
    iterate = type(sampler).__iter__
    # Check the method, not only the class: a subclass may give another order.
    if isinstance(sampler, SequentialSampler) and iterate is SequentialSampler.__iter__:
        return range(len(sampler.data_source))
    if isinstance(sampler, SeedableRandomSampler) and iterate is SeedableRandomSampler.__iter__:
        return sampler.order()
    if isinstance(sampler, RandomSampler) and iterate is RandomSampler.__iter__:
        generator = sampler.generator
        # With replacement torch draws blocks of 32, which only iterating it repeats exactly.
        if generator is not None and not sampler.replacement:
            return draw(sampler, generator, same_stream=True)
    isolated = None if seed is None else IsolatedRNG(mix_seed(seed, epoch))
    # It may be infinite, and a list of it would never be complete.
    if not hasattr(sampler, "__len__"):
        return _chunked(sampler, isolated)

    def listed() -> list[Any]:
        with isolated or nullcontext(), default_device_of(sampler_generator(sampler)):
            return _entries(sampler)

    return listed() if verify is None else verify(listed)


def _entries(sampler: Any) -> list[Any]:
    """List the entries of a sampler.

    Raises:
        ValueError: If it gives so many more than its length that it seems to repeat without end, or too many
            to list.
    """
    iterator = iter(sampler)
    entries = list(islice(iterator, _SURELY_FINITE))
    if len(entries) < _SURELY_FINITE:
        return entries
    try:
        length = len(sampler)
    except (AttributeError, TypeError, NotImplementedError):  # inherited, and not for this class
        return [*entries, *iterator]
    limit = min(2 * max(length, _SURELY_FINITE), _LISTED_AT_MOST)  # the length may be an estimate
    entries += islice(iterator, limit - len(entries))
    if len(entries) == limit:
        name = type(sampler).__name__
        raise ValueError(
            f"{name} is too long to list, or seems to repeat without end: its length is {length}, and it "
            f"gave {limit} entries. End its iteration after an epoch; or remove {name}.__len__, so that it "
            "is read step by step."
        )
    return entries


def is_drawn_by_torch(sampler: Any) -> bool:
    """Whether torch draws the order of a sampler, as `draw` does, or it is computed instead."""
    drawn = RandomSampler.__iter__, SeedableRandomSampler.__iter__
    return isinstance(sampler, RandomSampler) and type(sampler).__iter__ in drawn


def sampler_generator(sampler: object) -> torch.Generator | None:
    """Return the user's generator of a sampler, or of the sampler inside a batch sampler."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(candidate, SeedableRandomSampler):
            return None  # its order comes from a seed
        generator = getattr(candidate, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def can_seek(sampler: Any) -> bool:
    """Whether a sampler's order is a function of its attributes, so that iteration can start anywhere."""
    iterate = type(sampler).__iter__ if isinstance(sampler, Sampler) else None
    return iterate in (SequentialSampler.__iter__, SeedableRandomSampler.__iter__)


def take(order: range | torch.Tensor | KeyedPermutation | list[Any], positions: Sequence[int]) -> list[Any]:
    """Return the entries of an order at some positions."""
    if isinstance(order, (torch.Tensor, KeyedPermutation)):
        indices = torch.tensor(positions, dtype=torch.int64, device="cpu")
        found = order[indices] if isinstance(order, torch.Tensor) else order.at(indices)
        taken: list[Any] = found.tolist()
        return taken
    return [order[position] for position in positions]


def walk(order: Any, start: int = 0) -> Iterator[int]:
    """Iterate an order from a position on.

    Args:
        order: A range, a tensor or a permutation.
        start: The position.

    Yields:
        Its entries.
    """
    if isinstance(order, range):
        yield from order[start:]
        return
    for first in range(start, len(order), _BLOCK):
        last = min(first + _BLOCK, len(order))
        # As Python integers the full order would take ten times the memory.
        if isinstance(order, torch.Tensor):
            yield from order[first:last].tolist()
        else:
            yield from order.at(torch.arange(first, last, device="cpu")).tolist()


def _chunked(sampler: Iterable[Any], isolated: IsolatedRNG | None) -> Iterator[Any]:
    entries = iter(sampler)
    while True:
        with isolated or nullcontext(), default_device_of(sampler_generator(sampler)):
            # One at a time if nothing is isolated: drawing in advance would advance the user's generators.
            chunk = list(islice(entries, _CHUNK if isolated else 1))
        if not chunk:
            return
        yield from chunk


_GlobalRNG = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]
"""Functions that get, set and seed one of the global generators."""


def _global_rngs() -> list[_GlobalRNG]:
    rngs: list[_GlobalRNG] = [
        # Not torch.manual_seed, which would also seed the accelerators.
        (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        (random.getstate, random.setstate, random.seed),
    ]
    if "numpy" in sys.modules:  # else nothing has drawn from it
        numpy = sys.modules["numpy"].random
        rngs.append((numpy.get_state, numpy.set_state, lambda seed: numpy.seed(seed % 2**32)))
    return rngs


def global_states() -> list[Any]:
    """Return the states of the global random generators on the CPU."""
    return [get() for get, _, _ in _global_rngs()]


def _set_all(states: list[Any]) -> None:
    for (_, set_state, _), state in zip(_global_rngs(), states, strict=False):
        set_state(state)
