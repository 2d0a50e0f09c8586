"""Detects data that is already sharded, and compares the loaders of all ranks.

A sampler, batch sampler or dataset with a rank and a number of processes yields the shard of one process. A
map-style Hugging Face dataset that has been split does not say so: comparing rows detects it. A Hugging Face
stream with one shard per process is split here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from accel_data.order.mesh import DataParallelInfo
from accel_data.stream import hugging_face
from accel_data.stream.dataset import IterableDatasetShard
from accel_data.stream.first_sample import digest_of, same_data_message
from accel_ops.collectives.objects import gather_object
from accel_state.logging.warning import warn

_PAIRS = (
    ("rank", "num_replicas"),
    ("rank", "world_size"),
    ("process_index", "num_processes"),
    ("dp_rank", "dp_world_size"),
)
"""Attributes with the rank and the number of processes for which something shards data."""

_AMBIGUOUS = {"world_size", "num_processes"}
"""Those that a dataset may have for another purpose, such as logging."""

_SAMPLERS = ("batch_sampler", "sampler")
_DATASETS = ("dataset", "_data")
_DEPTH = 5  # nested wrappers that are searched
_COMPARED_ROWS = 1024  # compared where two processes have different rows


class ExistingSharding(NamedTuple):
    """Something that already yields the shard of one process.

    Args:
        rank: The process.
        size: Number of processes.
        holder: The sampler, batch sampler or dataset.
        of_dataset: Whether the dataset is sharded, rather than the order in which it is read.
        names: The attributes that say so; empty where something else does.
        lengths: Length of the dataset on each rank; None if unknown.
        shard: This rank's shard of a stream that was split here; None if the loader's dataset is the shard.
    """

    rank: int
    size: int
    source: Any
    of_dataset: bool
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    shard: IterableDataset[Any] | None = None

    @property
    def is_ambiguous(self) -> bool:
        """Whether its attributes may mean something else."""
        return self.of_dataset and not _AMBIGUOUS.isdisjoint(self.names)

    @property
    def rename_hint(self) -> str:
        """Advice for attributes that mean something else, as a sentence."""
        if not self.is_ambiguous:
            return ""
        return f" If its {self.names[0]} and {self.names[1]} mean something else, give them other names."


class _LoaderInfo(NamedTuple):
    """What the ranks tell each other about their loaders."""

    rank_and_size: tuple[int, int]
    existing: tuple[int, int, str, bool, str] | None
    length: int | None
    batch_size: int | None
    rows: bytes | None  # differs between datasets of one length


def find_sharding(dataloader: DataLoader[Any]) -> ExistingSharding | None:
    """Return what already shards the data of a loader; None if nothing says so.

    Args:
        dataloader: A loader that is not prepared.
    """
    samplers = [getattr(dataloader, name, None) for name in _SAMPLERS]
    for item in _unwrapped(samplers, _SAMPLERS):
        if found := _rank_and_size(item):
            return ExistingSharding(*found[0], item, False, found[1])
    for item in _unwrapped([dataloader.dataset], _DATASETS):
        if isinstance(item, IterableDatasetShard):
            return ExistingSharding(item.process_index, item.num_processes, item, True)
        # One shard is the full dataset, whatever its attributes are called.
        if (found := _rank_and_size(item)) and found[0][1] > 1:
            return ExistingSharding(*found[0], item, True, found[1])
        # Hugging Face streams have an attribute with rank and world size.
        if (found := _rank_and_size(getattr(item, "_distributed", None))) and found[0][1] > 1:
            return ExistingSharding(*found[0], item, True)
    return None


def describe_full_data(dataloader: Any) -> str | None:
    """Describe the data of a loader that reads the full dataset.

    Args:
        dataloader: Anything with a dataset, a sampler and a batch sampler, such as a loader that is not
            prepared.

    Returns:
        Its type and length, and what differs between shards of it; None if something shards it, or if that is
        unknown.
    """
    dataset = dataloader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    # A stream of another library may shard itself without saying so.
    if find_sharding(dataloader) is not None or (is_stream and not hugging_face.is_stream(dataset)):
        return None
    length = len(dataset) if hasattr(dataset, "__len__") else None
    if isinstance(dataset, TensorDataset) and length:  # it may hold the rows of one rank, as x[rank::2]
        rows: Any = digest_of([dataset[0]])
    else:
        rows = hugging_face.stream_digest(dataset) if is_stream else _rows(dataset)
    return f"{type(dataset).__name__} {length} {rows!r}"


def detect_sharding(
    dataloader: DataLoader[Any], dp: DataParallelInfo, compare: bool, presharded: bool = False
) -> ExistingSharding | None:
    """Find what already shards the data, and check that it does so for the processes that run.

    With several processes, all of them compare their loaders, so that all of them raise. A Hugging Face
    stream with one shard per process is split here, if all ranks have the same stream.

    Args:
        dataloader: A loader that is not prepared.
        dp: This process's data-parallel rank. The ranks compare their loaders if all of them prepare it.
        compare: Whether all of them read, and so must have the same data.
        presharded: Whether the user says that each process has its own data.

    Returns:
        What shards the data; None if nothing does.

    Raises:
        ValueError: If it is sharded for other processes, or the ranks have different data.
    """
    rank, size, all_ranks_prepare = dp.rank, dp.size, dp.all_ranks_prepare
    existing = find_sharding(dataloader)
    is_declared = presharded and size > 1 and (existing is None or existing.is_ambiguous)
    if is_declared:
        existing = ExistingSharding(rank, size, dataloader.dataset, True)
    infos = [_loader_info(dataloader, existing, (rank, size), compare)]
    if all_ranks_prepare:
        # One exchange for all checks below: every rank decides from the same information.
        infos = gather_object(infos)
    if (
        is_declared
        and all_ranks_prepare
        and infos[0].rows is not None
        and len({info.rows for info in infos}) == 1
    ):
        warn(same_data_message(type(dataloader.dataset).__name__))
    _check_ranks(infos)
    if existing is None and all_ranks_prepare:
        existing = _detect_by_comparing(dataloader, (rank, size), infos)
    if existing is None:
        return _split_stream(dataloader.dataset, (rank, size), infos)
    if not all_ranks_prepare:
        return existing
    lengths = tuple(info.length for info in _one_per_rank(infos) if info.length is not None)
    if existing.is_ambiguous and len({(info.length, info.rows) for info in _one_per_rank(infos)}) < 2:
        _warn_ambiguous(existing)
    if not existing.of_dataset or len(lengths) < size:
        return existing
    return existing._replace(lengths=lengths)


def _unwrapped(found: list[Any], links: Sequence[str]) -> Iterator[Any]:
    """Yield objects and what they wrap, outermost first."""
    for _ in range(_DEPTH):
        found = [item for item in found if item is not None]
        yield from found
        found = [_wrapped(item, name) for item in found for name in links]


def _wrapped(item: Any, name: str) -> Any:
    # Skip methods of this name, and objects that wrap themselves.
    inner = getattr(item, name, None)
    return None if callable(inner) or inner is item else inner


def _rank_and_size(item: Any) -> tuple[tuple[int, int], tuple[str, str]] | None:
    """Return (rank, number of processes), and the names of the attributes with them."""
    for names in _PAIRS:
        rank, size = (getattr(item, name, None) for name in names)
        # Exactly int: these attributes may also be tensors, flags or methods.
        if type(rank) is int and type(size) is int:
            return (rank, size), names
    return None


def _one_per_rank(infos: Sequence[_LoaderInfo]) -> list[_LoaderInfo]:
    """Return one process per data-parallel rank, in order of the ranks."""
    found = {info.rank_and_size: info for info in infos}
    return [found[rank_and_size] for rank_and_size in sorted(found)]


def _loader_info(
    dataloader: DataLoader[Any],
    existing: ExistingSharding | None,
    rank_and_size: tuple[int, int],
    compare: bool,
) -> _LoaderInfo:
    found = existing and (
        existing.rank,
        existing.size,
        type(existing.source).__name__,
        existing.of_dataset,
        existing.rename_hint,
    )
    dataset: Any = dataloader.dataset
    if not compare:
        return _LoaderInfo(rank_and_size, found, None, None, None)
    if isinstance(dataset, IterableDataset):
        divides = existing is None and hugging_face.has_shards_for(dataset, rank_and_size[1])
        return _LoaderInfo(
            rank_and_size, found, None, None, hugging_face.stream_digest(dataset) if divides else None
        )
    length = len(dataset) if hasattr(dataset, "__len__") else None
    rows = _rows(dataset)
    batch_size = getattr(dataloader.batch_sampler, "batch_size", dataloader.batch_size)
    return _LoaderInfo(rank_and_size, found, length, batch_size, rows)


def _rows(dataset: Any) -> bytes | None:
    """Return a digest that differs between shards of a dataset; None if there is none."""
    if isinstance(dataset, Subset):
        return hugging_face.digest(array("q", map(int, dataset.indices)).tobytes())
    # Three rows show whether the datasets differ. Only then are many rows compared to see how.
    if hugging_face.is_table(dataset) and len(dataset):
        last = len(dataset) - 1
        return b"".join(hugging_face.row_digests(dataset, sorted({0, len(dataset) // 2, last})))
    return None


def _check_ranks(infos: Sequence[_LoaderInfo]) -> None:
    """Raise if data is sharded for processes other than these, or only on some ranks."""
    found = {rank: info for rank, info in enumerate(infos) if info.existing is not None}
    for info in found.values():
        assert info.existing is not None
        rank, size, name, of_dataset, rename_hint = info.existing
        if (rank, size) != info.rank_and_size:
            expected = info.rank_and_size
            fix = "the full dataset" if of_dataset else "a loader without that (shuffle=True if it shuffles)"
            raise ValueError(
                f"The loader's data is already sharded: its {name} is for process {rank} of {size}, but "
                f"this is process {expected[0]} of {expected[1]}. Pass {fix}: the prepared loader shards it. "
                f"Or make the {name} for this process (num_replicas={expected[1]}, rank={expected[0]})."
                f"{rename_hint}"
            )
    if found and len(found) < len(infos):
        without = [rank for rank in range(len(infos)) if rank not in found]
        raise ValueError(
            f"The data of the loader of process {min(found)} is already sharded, but that of the "
            f"processes {without} is not. {_FIX_LOADERS}"
        )


def _detect_by_comparing(
    dataloader: DataLoader[Any], rank_and_size: tuple[int, int], infos: Sequence[_LoaderInfo]
) -> ExistingSharding | None:
    """Raise if ranks have different data, unless each of them has its shard of one dataset."""
    if len({info.batch_size for info in infos}) > 1:
        raise ValueError(
            f"The processes have different batch sizes: {_listed(infos, 'batch_size')}. {_FIX_LOADERS}"
        )
    dataset = dataloader.dataset
    if len({(info.length, info.rows) for info in infos}) == 1 or isinstance(dataset, IterableDataset):
        return None
    if hugging_face.is_table(dataset) and _are_shards(dataset, infos):
        return ExistingSharding(*rank_and_size, dataset, True)
    raise ValueError(
        f"The processes have different data in their {type(dataset).__name__} (lengths: "
        f"{_listed(infos, 'length')}), so that samples would be lost and others repeated. Give every "
        "process the full dataset, in the same order: the prepared loader shards it. Pass a seed to whatever "
        "shuffles or splits it at random. If each process is to have its own shard, pass presharded=True (in "
        "a DataLoaderConfiguration), or give the sampler or dataset the attributes `rank` and `num_replicas`."
    )


def _split_stream(
    dataset: Any, rank_and_size: tuple[int, int], infos: Sequence[_LoaderInfo]
) -> ExistingSharding | None:
    """Split a stream by its shards, if there is one per rank and all ranks have the same stream."""
    seen = {info.rows for info in infos}
    if None in seen or len(seen) > 1 or not hugging_face.has_shards_for(dataset, rank_and_size[1]):
        return None
    return ExistingSharding(
        *rank_and_size, dataset, True, shard=hugging_face.take_shard(dataset, *rank_and_size)
    )


def _warn_ambiguous(existing: ExistingSharding) -> None:
    """Warn that only the attributes of a dataset say that it is sharded."""
    name, (rank, size) = type(existing.source).__name__, existing.names
    warn(
        f"{name} has {rank}={existing.rank} and {size}={existing.size}, so it is taken for this "
        "process's shard and not sharded again. If it is the same on all processes, each of them reads all "
        f"of it: rename {rank} and {size}. If it is a shard, rename the second one to num_replicas to "
        "silence this warning.",
    )


_FIX_LOADERS = "Make the same loader on every process."


def _listed(infos: Sequence[_LoaderInfo], name: str) -> str:
    return ", ".join(f"{getattr(info, name)} on process {rank}" for rank, info in enumerate(infos))


def _are_shards(dataset: Any, infos: Sequence[_LoaderInfo]) -> bool:
    """Whether the datasets of the ranks are what split_dataset_by_node makes of one. A collective.

    Their lengths must be those of its shards, and of many rows none may be in two shards. (Rows that are
    twice in one shard show nothing.) Processes that get the same batches must have the same shard.
    """
    shards = _one_per_rank(infos)
    lengths = [info.length or 0 for info in shards]
    total, count = sum(lengths), len(lengths)
    # The lengths that split_dataset_by_node makes: the first shards have one more row.
    if lengths != [total // count + (rank < total % count) for rank in range(count)]:
        return False
    length = len(dataset)
    rows = sorted({length * i // _COMPARED_ROWS for i in range(_COMPARED_ROWS)}) if length else []
    digests: list[tuple[bytes, ...]] = gather_object([tuple(hugging_face.row_digests(dataset, rows))])
    # Processes of one rank count once, if they have the same rows.
    seen = {(info.rank_and_size, some) for info, some in zip(infos, digests, strict=True)}
    unique = [{row for row, times in Counter(some).items() if times == 1} for _, some in seen]
    agree = len(seen) == count
    return agree and any(unique) and sum(map(len, unique)) == len(set().union(*unique))
