"""Hugging Face `datasets`: detecting, comparing and sharding them."""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any


def is_table(dataset: Any) -> bool:
    """Whether a dataset is a map-style Hugging Face dataset."""
    module = sys.modules.get("datasets")
    # If the library is not imported, no dataset can be from it.
    return module is not None and isinstance(dataset, module.Dataset)


def row_digests(dataset: Any, rows: Sequence[int]) -> list[bytes]:
    """Return a digest for each of some rows as stored, before any formatting or transform."""
    if not rows:
        return []
    return [digest(pickle.dumps(row)) for row in dataset.with_format("arrow")[rows].to_pylist()]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a Hugging Face stream."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


def has_shards_for(dataset: Any, size: int) -> bool:
    """Whether a dataset is a Hugging Face stream with one shard per process, for several processes."""
    return is_stream(dataset) and dataset.n_shards == size > 1


def stream_digest(dataset: Any) -> bytes:
    """Return a digest that differs for streams with other shards, or with the same ones in another order.

    A stream that is shuffled without a seed differs from process to process.
    """
    seen = [_random_state(getattr(dataset, "_shuffling", None))]  # its place in datasets before 5.0
    for step in steps_of(dataset):
        # Addresses in a repr differ from process to process.
        shards = re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(step, "kwargs", None)))
        seen.append(f"{type(step).__name__} {_random_state(step)} {shards}")
    return digest("\n".join(seen).encode())


def steps_of(dataset: Any) -> Iterator[Any]:
    """Yield the processing steps of a stream, from the last step to its sources."""
    steps = [getattr(dataset, "_ex_iterable", None)]
    # The list grows while it is walked.
    for step in steps:
        if step is not None:
            yield step
            steps += [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())]


def take_shard(dataset: Any, rank: int, size: int) -> Any:
    """Return the stream of one process's shard, which opens no other shards."""
    library = type(dataset).__module__.partition(".")[0]
    return import_module(f"{library}.distributed").split_dataset_by_node(dataset, rank, size)


def digest(content: bytes) -> bytes:
    """Return a short digest."""
    return hashlib.blake2b(content, digest_size=8).digest()


def _random_state(step: Any) -> str:
    return str(getattr(getattr(getattr(step, "generator", None), "bit_generator", None), "state", None))
