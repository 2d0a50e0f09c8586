"""Compares the first sample that each process reads from a stream.

If each process reads the stream and keeps its shard, all must read the same samples. A dataset that shards
itself would be sharded twice, and most samples would never be seen. The same holds if process 0 reads for all
processes: it would only have its own shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

from accel_ops.collectives.comparison import is_equal_on_all_ranks, new_comparison_name
from accel_ops.collectives.pack_sections import as_bytes
from accel_ops.debug.store import default_store
from accel_ops.trees.walk import children
from accel_state.logging.warning import warn


class FirstSample(NamedTuple):
    """The properties of a sample that are compared.

    Args:
        digest: Differs for samples with other tensors, arrays, numbers or strings.
        is_random: Whether the global random generators were used while it was read.
        queries_rank: Whether `torch.distributed.get_rank` was called meanwhile.
    """

    digest: str
    is_random: bool
    queries_rank: bool


@contextmanager
def detect_rank_query(active: bool) -> Iterator[list[bool]]:
    """Record inside a `with` statement whether `torch.distributed.get_rank` is called.

    Args:
        active: Whether to do so.

    Yields:
        A list that is empty until it is called.
    """
    queries: list[bool] = []
    if not active:
        yield queries
        return
    get_rank = dist.get_rank

    def recorded_get_rank(*args: Any, **kwargs: Any) -> int:
        queries.append(True)
        return get_rank(*args, **kwargs)

    # torch has no other way to detect this.
    dist.get_rank = recorded_get_rank
    try:
        yield queries
    finally:
        dist.get_rank = get_rank


def digest_of(samples: list[Any]) -> str:
    """Return a digest of the first of some samples.

    For objects of unknown types only the type counts, as their content may differ in form on each process:
    the digest then ends with a question mark.
    """
    content, end = hashlib.blake2b(digest_size=8), ""
    if not samples:
        content.update(b"no samples")
    for leaf in _leaves(samples[:1]):
        content.update(type(leaf).__name__.encode())
        content_bytes = _bytes_of(leaf)
        if content_bytes is None:
            end = "?"
        else:
            content.update(content_bytes)
    return content.hexdigest() + end


def _bytes_of(leaf: Any) -> bytes | None:
    """Return bytes that distinguish a leaf from others of its type; None if unknown."""
    if isinstance(leaf, (str, bytes, int, float, complex, type(None))):
        return repr(leaf).encode()
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            return None
        return bytes(as_bytes(leaf.detach()).numpy().tobytes())
    # Arrays and images; the bytes of an array of objects are their addresses.
    has_objects = getattr(getattr(leaf, "dtype", None), "hasobject", False)
    return None if has_objects or not callable(getattr(leaf, "tobytes", None)) else bytes(leaf.tobytes())


class SampleComparison:
    """Compares the first samples of a loader between the ranks. All ranks must create it for the same loader.

    It uses the store of the process group, not a collective: a rank that iterates alone does not hang.

    Args:
        name: Name of the dataset.
        presharded: Whether the user says that each process has its own shard: then they should differ.
    """

    def __init__(self, name: str, presharded: bool = False) -> None:
        self._name = name
        self._presharded = presharded
        self._world = dist.get_world_size()
        group = dist.group.WORLD
        self._group: ReferenceType[Any] = ref(group)
        self._key = new_comparison_name("first_sample")
        self.is_done = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # a copy in another process is not in this process group

    def compare(self, first: FirstSample) -> None:
        """Compare the sample of this rank with those of the other ranks.

        Raises:
            ValueError: If they differ, on every rank, whenever it compares.
        """
        self.is_done = True
        store: Any = default_store()
        if store is None or self._group() is not dist.group.WORLD:
            return
        random_key = f"accel/{self._key}/random"
        if first.is_random:
            store.set(random_key, "yes")
        equal = is_equal_on_all_ranks(self._key, first.digest, self._world)
        if self._presharded:
            if equal and first.digest != digest_of([]) and not first.digest.endswith("?"):
                warn(same_data_message(self._name))
            return
        if equal is not False:
            return
        if not store.check([random_key]):
            raise ValueError(f"{_DIFFER.format(self._name)} {_FIX}")
        # It may only be augmentation: then nothing is lost.
        warn(f"{_DIFFER.format(self._name)} It uses the global random generators. {_RANDOM} {_FIX}")


class RankQueryWarning:
    """Warns if a stream that process 0 reads for all processes seems to be sharded by rank.

    Args:
        name: Name of the dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_done = False

    def compare(self, first: FirstSample) -> None:
        """Check the first sample."""
        self.is_done = True
        if first.queries_rank:
            warn(
                f"{self._name} reads the rank of the process, but only process 0 reads the dataset "
                "(dispatch_batches=True, the default for streams). If it shards itself over the processes, "
                "the samples of all other processes are never seen: pass presharded=True (to "
                "DataLoaderConfiguration or prepare_data_loader)."
            )


def same_data_message(name: str) -> str:
    """Return the warning that data is not sharded although presharded=True was passed.

    Args:
        name: Name of the dataset.
    """
    return (
        f"presharded=True says that each process has its own shard of the data, but all of them read the "
        f"same from {name}: each trains on, or evaluates, all of it. Remove the setting to shard it. To "
        "preshard only some loaders, call accel_data.prepare_data_loader(..., presharded=True) on these."
    )


def _leaves(node: Any) -> list[Any]:
    inside = children(node)
    if inside is None:
        return [node]
    names = sorted(map(str, node)) if isinstance(node, dict) else []
    return [*names, *(leaf for child in inside for leaf in _leaves(child))]


def _none() -> None:
    return None


_DIFFER = (
    "The processes read different first samples from {}, of which each would keep a shard: samples would be "
    "lost, and others repeated."
)
_RANDOM = "If it draws only for augmentation, nothing is lost; use sample_rng then."
_FIX = (
    "If the dataset shards itself over the processes, pass presharded=True (to DataLoaderConfiguration or "
    "prepare_data_loader). If it shuffles, use the same seed on all processes. Or pass "
    "dispatch_batches=True, so that only process 0 reads."
)
