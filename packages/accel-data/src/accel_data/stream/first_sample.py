"""The first sample that a process reads from a stream, compared between the processes.

Where each process reads the stream by itself and keeps its share, all must read the same samples. A dataset
that divides itself over the processes would be divided a second time, and most samples would never come. So
it is where process 0 reads for all: it would have its own part alone.
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
    """What is compared of a sample.

    Args:
        digest: Differs for samples with other tensors, arrays, numbers or strings.
        is_random: Whether the global random generators were used while it was read.
        asks_rank: Whether torch was asked for the rank of the process meanwhile.
    """

    digest: str
    is_random: bool
    asks_rank: bool


@contextmanager
def watching_for_rank(active: bool) -> Iterator[list[bool]]:
    """Note inside of a `with` statement whether somebody asks torch for the rank of this process.

    Args:
        active: Whether to do so.

    Yields:
        What is empty until somebody does.
    """
    asked: list[bool] = []
    if not active:
        yield asked
        return
    get_rank = dist.get_rank

    def watched(*args: Any, **kwargs: Any) -> int:
        asked.append(True)
        return get_rank(*args, **kwargs)

    # torch has no other way to see this.
    dist.get_rank = watched
    try:
        yield asked
    finally:
        dist.get_rank = get_rank


def digest_of(samples: list[Any]) -> str:
    """Return a digest of the first of some samples.

    Of objects of unknown types only the type counts, as their content may have another form on each process:
    the digest then ends with a question mark.
    """
    content, end = hashlib.blake2b(digest_size=8), ""
    if not samples:
        content.update(b"no samples")
    for leaf in _leaves(samples[:1]):
        content.update(type(leaf).__name__.encode())
        known = _bytes_of(leaf)
        if known is None:
            end = "?"
        else:
            content.update(known)
    return content.hexdigest() + end


def _bytes_of(leaf: Any) -> bytes | None:
    """Return what tells a leaf from others of its type; None where that is not known."""
    if isinstance(leaf, (str, bytes, int, float, complex, type(None))):
        return repr(leaf).encode()
    if isinstance(leaf, torch.Tensor):
        if not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            return None
        return bytes(as_bytes(leaf.detach()).numpy().tobytes())
    # Arrays and images; the bytes of an array of objects are their addresses.
    holds_objects = getattr(getattr(leaf, "dtype", None), "hasobject", False)
    return None if holds_objects or not callable(getattr(leaf, "tobytes", None)) else bytes(leaf.tobytes())


class SampleComparison:
    """This process's part in comparing the first samples of a loader. All processes make it together.

    It goes through the store of the process group, not a collective: a process that iterates alone goes on.

    Args:
        name: Name of the dataset.
        presharded: Whether the user says that each process has its own part: then they are to differ.
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
        return _nothing, ()  # a loader that goes elsewhere has no part in this process group

    def compare(self, first: FirstSample) -> None:
        """Compare the sample of this process with those of the others.

        Raises:
            ValueError: If they differ, on every process that comes in time, and on those that come later.
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
                warn(same_data(self._name))
            return
        if equal is not False:
            return
        if not store.check([random_key]):
            raise ValueError(f"{_DIFFER.format(self._name)} {_FIX}")
        # Which may be augmentation alone: nothing is lost then.
        warn(f"{_DIFFER.format(self._name)} It uses the global random generators. {_RANDOM} {_FIX}")


class RankNotice:
    """Warns if a stream that process 0 reads for all processes seems to have the samples of that one alone.

    Args:
        name: Name of the dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_done = False

    def compare(self, first: FirstSample) -> None:
        """Look at the first sample."""
        self.is_done = True
        if first.asks_rank:
            warn(
                f"{self._name} asks for the rank of the process, and process 0 alone reads it "
                "(dispatch_batches=True, the default for streams). If it shares itself out over the "
                "processes, the samples of all others never come: say so with presharded=True (in a "
                "DataLoaderConfiguration, or of prepare_data_loader)."
            )


def same_data(name: str) -> str:
    """Return the warning that data is not sharded although the user says so.

    Args:
        name: Name of the dataset.
    """
    return (
        f"presharded=True says that each process has its own part of the data, but all of them read the same "
        f"from {name}: each trains on, or evaluates, all of it. Without the setting it is shared out. For "
        "some of the loaders only, call prepare_data_loader(..., presharded=True) of accel_data with these."
    )


def _leaves(node: Any) -> list[Any]:
    inside = children(node)
    if inside is None:
        return [node]
    names = sorted(map(str, node)) if isinstance(node, dict) else []
    return [*names, *(leaf for child in inside for leaf in _leaves(child))]


def _nothing() -> None:
    return None


_DIFFER = (
    "The processes read different first samples from {}, of which each would keep a share: samples would be "
    "lost, and others repeated."
)
_RANDOM = "If it draws for augmentation only, nothing is lost; draw from sample_rng then."
_FIX = (
    "If the dataset shares itself out over the processes, say so with presharded=True (in a "
    "DataLoaderConfiguration, or of prepare_data_loader). If it shuffles, let it do so from a seed that all "
    "processes have. Or pass dispatch_batches=True, so that process 0 alone reads."
)
