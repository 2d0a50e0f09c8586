"""Finds data that is sharded already, and compares the loaders that the processes were given.

A sampler, batch sampler or dataset that knows a rank and a number of processes gives one process its share. A
map-style dataset of Hugging Face that has been split does not say so: that is found by comparing rows. A
stream of theirs with one shard for each process is split here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from accel_data.order.mesh import Place
from accel_data.stream import hugging_face
from accel_data.stream.dataset import IterableDatasetShard
from accel_data.stream.first_sample import digest_of, same_data
from accel_ops.collectives.objects import gather_object
from accel_state.logging.warning import warn

_PAIRS = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("dp_rank", "dp_world_size"),
)
"""Attributes that name the process and the number of processes that something shares data out for."""

_LOOSE = {"world_size", "num_processes"}
"""Those that a dataset may have for something else, such as messages."""

_SAMPLERS = ("batch_sampler", "sampler")
_DATASETS = ("dataset", "_data")
_DEPTH = 5  # of wrappers that are looked into
_ROWS = 1024  # compared where two processes have different rows


class Split(NamedTuple):
    """Something that gives one process its share.

    Args:
        rank: The process.
        size: Number of processes.
        holder: The sampler, batch sampler or dataset.
        of_dataset: Whether the dataset is shared out, rather than the order in which it is read.
        names: The attributes that say so; empty where something else does.
        lengths: Length of the dataset on each process; None where not known.
        part: The share of a stream that was split here; None where the loader's dataset is the share.
    """

    rank: int
    size: int
    holder: Any
    of_dataset: bool
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    part: IterableDataset[Any] | None = None

    @property
    def is_loose(self) -> bool:
        """Whether its attributes may mean something else."""
        return self.of_dataset and not _LOOSE.isdisjoint(self.names)

    @property
    def rename(self) -> str:
        """Advice for attributes that mean something else, as a sentence."""
        if not self.is_loose:
            return ""
        return f" If its {self.names[0]} and {self.names[1]} mean something else, give them other names."


class _Facts(NamedTuple):
    """The facts of one process's loader, which the processes exchange."""

    place: tuple[int, int]
    split: tuple[int, int, str, bool, str] | None
    length: int | None
    batch_size: int | None
    rows: bytes | None  # differ between datasets of one length


def find_split(dataloader: DataLoader[Any]) -> Split | None:
    """Return what shares the data of a loader out already; None if nothing says that it does.

    Args:
        dataloader: A loader that is not prepared.
    """
    samplers = [getattr(dataloader, name, None) for name in _SAMPLERS]
    for part in _inside(samplers, _SAMPLERS):
        if found := _place_of(part):
            return Split(*found[0], part, False, found[1])
    for part in _inside([dataloader.dataset], _DATASETS):
        if isinstance(part, IterableDatasetShard):
            return Split(part.process_index, part.num_processes, part, True)
        # A dataset of one part is a whole one, whatever its attributes are called.
        if (found := _place_of(part)) and found[0][1] > 1:
            return Split(*found[0], part, True, found[1])
        # Hugging Face's streams have an attribute with the place.
        if (found := _place_of(getattr(part, "_distributed", None))) and found[0][1] > 1:
            return Split(*found[0], part, True)
    return None


def describe_full_data(dataloader: Any) -> str | None:
    """Describe the data of a loader that is read whole.

    Args:
        dataloader: What has a dataset, a sampler and a batch sampler, as a loader that is not prepared.

    Returns:
        Its type, length, and what differs between parts of it that processes may have; None where something
        shares it out, or where that is not known.
    """
    dataset = dataloader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    # A stream of another library may share itself out, and say so nowhere.
    if find_split(dataloader) is not None or (is_stream and not hugging_face.is_stream(dataset)):
        return None
    length = len(dataset) if hasattr(dataset, "__len__") else None
    if isinstance(dataset, TensorDataset) and length:  # whose rows may be those of one process, as x[rank::2]
        rows: Any = digest_of([dataset[0]])
    else:
        rows = hugging_face.stream_digest(dataset) if is_stream else _rows(dataset)
    return f"{type(dataset).__name__} {length} {rows!r}"


def split_everywhere(
    dataloader: DataLoader[Any], place: Place, compare: bool, presharded: bool = False
) -> Split | None:
    """Find what shares the data out already, and make sure that it does so for the processes that run.

    Where several processes run they compare what they have been given, so that all of them raise. A stream of
    Hugging Face with one shard for each process is split here, if all processes have the same.

    Args:
        dataloader: A loader that is not prepared.
        place: Where this process stands among those that share the data out, which compare what they have
            where all processes of the run do this.
        compare: Whether all of them read, and so must have the same data.
        presharded: Whether the user says that each process has data of its own.

    Returns:
        What shares the data out; None if nothing does.

    Raises:
        ValueError: If it does so for other processes, or the processes have different data.
    """
    rank, size, together = place.rank, place.size, place.together
    split = find_split(dataloader)
    said = presharded and size > 1 and (split is None or split.is_loose)
    if said:
        split = Split(rank, size, dataloader.dataset, True)
    everyone = [_facts(dataloader, split, (rank, size), compare)]
    if together:
        # One exchange for all checks below: every process raises or goes on, from what all have seen.
        everyone = gather_object(everyone)
    if said and together and everyone[0].rows is not None and len({facts.rows for facts in everyone}) == 1:
        warn(same_data(type(dataloader.dataset).__name__))
    _check_places(everyone)
    if split is None and together:
        split = _found_by_comparing(dataloader, (rank, size), everyone)
    if split is None:
        return _split_by_shards(dataloader.dataset, (rank, size), everyone)
    if not together:
        return split
    lengths = tuple(facts.length for facts in _one_of_each(everyone) if facts.length is not None)
    if split.is_loose and len({(facts.length, facts.rows) for facts in _one_of_each(everyone)}) < 2:
        _warn_of_loose(split)
    if not split.of_dataset or len(lengths) < size:
        return split
    return split._replace(lengths=lengths)


def _inside(found: list[Any], links: Sequence[str]) -> Iterator[Any]:
    """Yield things and what they wrap, from the outside."""
    for _ in range(_DEPTH):
        found = [part for part in found if part is not None]
        yield from found
        found = [_attribute(part, name) for part in found for name in links]


def _attribute(part: Any, name: str) -> Any:
    # A method of this name is no part, and a thing that wraps itself would be looked into for ever.
    inner = getattr(part, name, None)
    return None if callable(inner) or inner is part else inner


def _place_of(part: Any) -> tuple[tuple[int, int], tuple[str, str]] | None:
    """Return the process and the number of processes, and the attributes that name them."""
    for names in _PAIRS:
        rank, size = (getattr(part, name, None) for name in names)
        # Exactly int: attributes of these names may also be tensors, flags or methods.
        if type(rank) is int and type(size) is int:
            return (rank, size), names
    return None


def _one_of_each(everyone: Sequence[_Facts]) -> list[_Facts]:
    """Return one of the processes that get the same batches, of each such group, in the order of shares."""
    found = {facts.place: facts for facts in everyone}
    return [found[place] for place in sorted(found)]


def _facts(dataloader: DataLoader[Any], split: Split | None, place: tuple[int, int], compare: bool) -> _Facts:
    found = split and (split.rank, split.size, type(split.holder).__name__, split.of_dataset, split.rename)
    dataset: Any = dataloader.dataset
    if not compare:
        return _Facts(place, found, None, None, None)
    if isinstance(dataset, IterableDataset):
        divides = split is None and hugging_face.has_shards_for(dataset, place[1])
        return _Facts(place, found, None, None, hugging_face.stream_digest(dataset) if divides else None)
    length = len(dataset) if hasattr(dataset, "__len__") else None
    rows = _rows(dataset)
    batch_size = getattr(dataloader.batch_sampler, "batch_size", dataloader.batch_size)
    return _Facts(place, found, length, batch_size, rows)


def _rows(dataset: Any) -> bytes | None:
    """Return a digest that differs between parts of a dataset; None where nothing is known of it."""
    if isinstance(dataset, Subset):
        return hugging_face.digest(array("q", map(int, dataset.indices)).tobytes())
    # Three rows show whether the datasets differ; how they do is asked only then, with many rows.
    if hugging_face.is_table(dataset) and len(dataset):
        last = len(dataset) - 1
        return b"".join(hugging_face.row_digests(dataset, sorted({0, len(dataset) // 2, last})))
    return None


def _check_places(everyone: Sequence[_Facts]) -> None:
    """Raise if something shares data out for other processes than these, or only on some of them."""
    found = {rank: facts for rank, facts in enumerate(everyone) if facts.split is not None}
    for facts in found.values():
        assert facts.split is not None
        rank, size, name, of_dataset, rename = facts.split
        if (rank, size) != facts.place:
            here = facts.place
            fix = "the whole dataset" if of_dataset else "a loader without that (shuffle=True if it shuffles)"
            raise ValueError(
                f"The loader shares its data out already: its {name} is for process {rank} of {size}, but "
                f"this is process {here[0]} of {here[1]}. Pass {fix}: the prepared loader shares out by "
                f"itself. Or make the {name} for this process (num_replicas={here[1]}, rank={here[0]})."
                f"{rename}"
            )
    if found and len(found) < len(everyone):
        without = [rank for rank in range(len(everyone)) if rank not in found]
        raise ValueError(
            f"The loader of process {min(found)} shares its data out already, but those of the "
            f"processes {without} do not. {_SAME}"
        )


def _found_by_comparing(
    dataloader: DataLoader[Any], place: tuple[int, int], everyone: Sequence[_Facts]
) -> Split | None:
    """Raise if processes have different data, unless each of them has its share of one dataset."""
    if len({facts.batch_size for facts in everyone}) > 1:
        raise ValueError(
            f"The processes have different batch sizes: {_each(everyone, 'batch_size')}. {_SAME}"
        )
    dataset = dataloader.dataset
    if len({(facts.length, facts.rows) for facts in everyone}) == 1 or isinstance(dataset, IterableDataset):
        return None
    if hugging_face.is_table(dataset) and _are_shares(dataset, everyone):
        return Split(*place, dataset, True)
    raise ValueError(
        f"The processes have different data in their {type(dataset).__name__} (lengths: "
        f"{_each(everyone, 'length')}), so that samples would be lost and others repeated. Give every "
        "process the whole dataset, in one order: the prepared loader shares out by itself. Pass a seed to "
        "what shuffles or splits it at random. Where each process is to have a part of its own, say so with "
        "presharded=True (in a DataLoaderConfiguration), or by attributes `rank` and `num_replicas` of the "
        "sampler or dataset."
    )


def _split_by_shards(dataset: Any, place: tuple[int, int], everyone: Sequence[_Facts]) -> Split | None:
    """Give each process its shard of a stream, if there is one for each and all processes have the same."""
    seen = {facts.rows for facts in everyone}
    if None in seen or len(seen) > 1 or not hugging_face.has_shards_for(dataset, place[1]):
        return None
    return Split(*place, dataset, True, part=hugging_face.take_shard(dataset, *place))


def _warn_of_loose(split: Split) -> None:
    """Warn that attributes of a dataset alone say that it is shared out."""
    name, (rank, size) = type(split.holder).__name__, split.names
    warn(
        f"{name} has {rank}={split.rank} and {size}={split.size}, so it passes as one that holds the samples "
        f"of this process alone, and is not shared out. If it holds the same on all processes, each of them "
        f"reads all of it: give {rank} and {size} other names. If it does hold a part, name the second one "
        "num_replicas, and this warning does not come.",
    )


_SAME = "Make the same loader on every process."


def _each(everyone: Sequence[_Facts], name: str) -> str:
    return ", ".join(f"{getattr(facts, name)} on process {rank}" for rank, facts in enumerate(everyone))


def _are_shares(dataset: Any, everyone: Sequence[_Facts]) -> bool:
    """Whether the datasets of the processes are what split_dataset_by_node makes of one; all must ask.

    Their lengths must be those of its shares, and of many rows none may be in two shares. (Rows that are
    twice in one share show nothing.) Processes that get the same batches must have the same share.
    """
    shares = _one_of_each(everyone)
    lengths = [facts.length or 0 for facts in shares]
    total, count = sum(lengths), len(lengths)
    # The lengths that split_dataset_by_node makes: the first shares have one row more.
    if lengths != [total // count + (rank < total % count) for rank in range(count)]:
        return False
    length = len(dataset)
    rows = sorted({length * i // _ROWS for i in range(_ROWS)}) if length else []
    digests: list[tuple[bytes, ...]] = gather_object([tuple(hugging_face.row_digests(dataset, rows))])
    # Processes with one place count once, if they have shown the same rows.
    seen = {(facts.place, some) for facts, some in zip(everyone, digests, strict=True)}
    unique = [{row for row, times in Counter(some).items() if times == 1} for _, some in seen]
    alike = len(seen) == count
    return alike and any(unique) and sum(map(len, unique)) == len(set().union(*unique))
