"""The first sample that a process reads from a stream, compared between the processes.

Where each process reads the stream by itself and keeps its share, all must read the same samples. A dataset
that divides itself over the processes would be divided a second time, and most samples would never come.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from accel_ops.debug.session import default_store
from accel_ops.trees.walk import children
from accel_state.logging.warning import warn

_PATIENCE = timedelta(seconds=5)
"""How long a process waits for the others, which need not iterate. Who comes later sees what was noted."""

_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How many loaders were counted, per process group."""


class FirstSample(NamedTuple):
    """What is compared of a sample.

    Args:
        digest: Differs for samples with other tensors, arrays, numbers or strings.
        is_random: Whether the global random generators were used while it was read.
    """

    digest: str
    is_random: bool


def digest_of(samples: list[Any]) -> str:
    """Return a digest of the first of some samples.

    Of objects of unknown types only the type counts, as their content may have another form on each process.
    """
    content = hashlib.blake2b(digest_size=8)
    if not samples:
        content.update(b"no samples")
    for leaf in _leaves(samples[:1]):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_cpu and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized):
                flat = leaf.detach().resolve_conj().resolve_neg().flatten()
                content.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (str, bytes, int, float, complex, type(None))):
            content.update(repr(leaf).encode())
        # Arrays and images; the bytes of an array of objects are their addresses.
        elif callable(getattr(leaf, "tobytes", None)) and not _holds_objects(leaf):
            content.update(leaf.tobytes())
        content.update(type(leaf).__name__.encode())
    return content.hexdigest()


class SampleComparison:
    """This process's part in comparing the first samples of a loader. All processes make it together.

    It goes through the store of the process group, not a collective: a process that iterates alone goes on.

    Args:
        name: Name of the dataset.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._world = dist.get_world_size()
        group = dist.group.WORLD
        self._group: ReferenceType[Any] = ref(group)
        # Counted where the group is: all processes make their loaders in one order.
        counts = _made.setdefault(group, Counter())
        self._prefix = f"accel/first_sample/{counts['loaders']}"
        counts["loaders"] += 1
        self.is_done = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a loader that goes elsewhere has no part in this process group

    def compare(self, first: FirstSample) -> None:
        """Compare the sample of this process with those of the others.

        Raises:
            ValueError: If they differ, on every process that comes in time, and on those that come later.
        """
        self.is_done = True
        base = default_store()
        if base is None or self._group() is not dist.group.WORLD:
            return
        store: Any = dist.PrefixStore(self._prefix, base)  # type: ignore[attr-defined]
        if first.is_random:
            store.set("random", "yes")
        if store.compare_set("first", "", first.digest).decode() != first.digest:
            store.set("differ", "yes")
        if store.add("come", 1) == self._world or store.check(["differ"]):
            store.set("compared", "yes")
        with suppress(RuntimeError):  # not all have come in time
            store.wait(["compared"], _PATIENCE)
        if not store.check(["differ"]):
            return
        if not store.check(["random"]):
            raise ValueError(f"{_DIFFER.format(self._name)} {_FIX}")
        # Which may be augmentation alone: nothing is lost then.
        warn(f"{_DIFFER.format(self._name)} It uses the global random generators. {_RANDOM} {_FIX}")


def _leaves(node: Any) -> list[Any]:
    inside = children(node)
    if inside is None:
        return [node]
    names = sorted(map(str, node)) if isinstance(node, dict) else []
    return [*names, *(leaf for child in inside for leaf in _leaves(child))]


def _holds_objects(array: Any) -> bool:
    return bool(getattr(getattr(array, "dtype", None), "hasobject", False))


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
