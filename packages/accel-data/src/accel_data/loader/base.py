"""The base class of prepared loaders: a torch DataLoader that tracks its epoch and position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_data.loader.tensors import batched_reads
from accel_data.loader.workers import start_iteration, track_positions
from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.layout import StepRows
from accel_data.order.mixing import mix_seed
from accel_data.order.presharded_sampler import PreshardedBatchSampler
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.skipping import SkipBatchSampler
from accel_data.resume.cursor import (
    Cursor,
    EpochRun,
    LoaderDescription,
    Progress,
    from_state,
    start_of_next_epoch,
    to_state,
)
from accel_data.resume.stream_position import PositionHistory
from accel_data.seeds import epoch_key, iterate_with_key
from accel_data.stream.dataset import BlockReader, CollateBlock, IterableDatasetShard, PreshardedStream
from accel_data.stream.first_sample import RankQueryWarning, SampleComparison
from accel_data.torchdata.state import PlainLoader, from_torchdata, is_from_torchdata, to_torchdata
from accel_data.torchdata.stateful import stateful_class

# Attributes of torch.utils.data.DataLoader that are also its arguments, except for sampling.
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
# torch raises if these are given without workers.
_WORKER_SETTINGS = ("multiprocessing_context", "prefetch_factor")


class DataLoaderAdapter(DataLoader[Any]):
    """A torch DataLoader that tracks its epoch, and how much of it has been yielded.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Make this an instance of torchdata's StatefulDataLoader, too, which can
            exchange states with it (the extra `stateful` installs it).
        batch_sampler: The batch sampler.
        **kwargs: Further arguments of `torch.utils.data.DataLoader`.

    Raises:
        ImportError: If `use_stateful_dataloader` is given and torchdata is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            # An instance of torchdata's class, but its iteration is not used.
            self.__class__ = stateful_class(type(self))
            self.snapshot_every_n_steps = kwargs.pop("snapshot_every_n_steps", 1)
        # Not super(): torchdata's loader would insert its own samplers.
        DataLoader.__init__(self, dataset, batch_sampler=batch_sampler, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.skip_batches = 0
        self._sets_epochs = True
        self.synchronized_generator: torch.Generator | None = None
        self._reader: DataLoader[Any] | None = None
        self._comparison: SampleComparison | RankQueryWarning | None = None
        self._workers_rank = 0
        self._shard = None if isinstance(dataset, IterableDataset) else self._install_shard()
        self._progress = Progress(pre_shard=pre_shard_of(dataset if self._shard is None else self._shard))

    @property
    def iteration(self) -> int:
        """Number of the current or next epoch."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def resumes(self) -> bool:
        """Whether the next iteration continues from a loaded state."""
        return self._progress.resumes

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one step over all processes; None if the batch size is unknown."""
        if self._shard is None:
            return self._step_size if self.batch_size is not None else None
        return None if self._shard.batch_size is None else self._shard.step_size

    @property
    def total_dataset_length(self) -> int:
        """Length of the full dataset."""
        shard = self._shard
        if isinstance(shard, PreshardedBatchSampler) and shard.lengths is not None:
            return sum(shard.lengths)
        return len(self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset)  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """Return the innermost sampler."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the innermost sampler.

        Args:
            sampler: The new one.
        """
        source: Any = None if self._shard is None else unwrap_shards(self._shard)
        if not hasattr(source, "sampler"):
            raise ValueError(f"This loader has no sampler that could be replaced by {sampler!r}.")
        # The batch sampler makes batches from it; the outer shard looks it up there.
        source.sampler = sampler
        if self.batch_sampler is not None:
            self.__dict__["sampler"] = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without it each iteration is the next epoch.

        Args:
            epoch: Its number, from 0.
        """
        self._progress.set_epoch(epoch)
        self._sets_epochs = True
        self._set_inner_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader: seed, epoch, and samples yielded over all processes.

        After leaving an iteration early, its position is kept until the next iteration begins.
        """
        generator = self.synchronized_generator
        state = None if generator is None else generator.get_state()
        cursor = self._progress.cursor(self._step_size, state)
        place = to_state(cursor, self._description, self._sample_seed)
        if self.use_stateful_dataloader:
            place |= to_torchdata(cursor, self._plain_loader, epoch_key(self._sample_seed, cursor.epoch))
        return place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a position: the next iteration yields the rest of its epoch, on any number of processes.

        The state at an epoch's last batch is that of its end: the next iteration is the next epoch.

        Args:
            state_dict: What `state_dict` returned, possibly in another run; or that of torchdata's
                StatefulDataLoader, whose epoch is assumed to be that of this loader.

        Raises:
            ValueError: If it is not the state of a loader like this one over a dataset like this one.
        """
        cursor = self._cursor_of(state_dict)
        if not is_from_torchdata(state_dict):
            if self._shard is not None and self._seed is not None:
                self._shard.set_seed(int(state_dict["seed"]))
                # States from before keyed orders do not have it.
                self._shard.set_keyed(bool(state_dict.get("keyed", False)))
                drawn = isinstance(self._shard.order_sampler, SeedableRandomSampler)
                if "keyed" not in state_dict and drawn and not cursor.ended and cursor.order is None:
                    # Their epochs were drawn from another seed; later epochs are drawn as now.
                    seed = mix_seed(int(state_dict["seed"]), cursor.epoch)
                    cursor = replace(cursor, order=torch.Generator().manual_seed(seed).get_state())
            self._progress.sample_seed = int(state_dict["sample_seed"])
        self._progress.resume(cursor)
        self._set_inner_epoch(self._progress.epoch)

    def set_workers_rank(self, rank: int) -> None:
        """Make workers draw other random numbers than those of other data-parallel ranks.

        Args:
            rank: The data-parallel rank of this process.
        """
        self._workers_rank = rank

    def set_comparison(self, comparison: SampleComparison | RankQueryWarning) -> None:
        """Set what checks the first sample of a stream.

        Args:
            comparison: See the class.
        """
        self._comparison = comparison

    def fitting_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state to load, given one that may be of another dataset. Nothing is changed.

        Args:
            state_dict: As for `load_state_dict`.

        Returns:
            The state itself if it fits. For another dataset's state at the start or end of an epoch, the
            start of the next epoch, with all samples of this dataset.

        Raises:
            ValueError: If it does not fit, in the middle of an epoch.
        """
        try:
            self._cursor_of(state_dict)
        except ValueError:
            place = start_of_next_epoch(state_dict)
            if place is None:
                raise
            state = to_state(
                replace(place, part=self._progress.pre_shard), self._description, self._sample_seed
            )
            if None not in (state["seed"], state_dict["seed"]):
                state |= {"seed": state_dict["seed"], "keyed": state_dict.get("keyed", False)}
            return state
        return state_dict

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: a state counts what was yielded, not what was prefetched."""

    def __len__(self) -> int:
        return max(self._num_batches() - self.skip_batches, 0)

    # The rest is for the loaders of this package.

    def _num_batches(self) -> int:
        """Number of batches in an epoch, including skipped ones."""
        return super().__len__()

    def _cursor_of(self, state_dict: Mapping[str, Any]) -> Cursor:
        if is_from_torchdata(state_dict):
            return from_torchdata(
                state_dict, self._plain_loader, self._progress.epoch, self._progress.pre_shard
            )
        return from_state(state_dict, self._description)

    @property
    def _step_size(self) -> int:
        """Positions in the global order of one step over all processes."""
        if self._shard is not None:
            return self._shard.step_size
        return self._stream_shard().step_size

    @property
    def _limit(self) -> int | None:
        return None if self._shard is None else self._shard.num_samples

    @property
    def _description(self) -> LoaderDescription:
        is_stream, pre_shard = self._shard is None, self._progress.pre_shard
        is_known = not is_stream and hasattr(self.dataset, "__len__")
        if pre_shard is not None and getattr(self._shard, "lengths", None) is None:
            is_known = False  # the other ranks' shards may have other lengths
        length = self.total_dataset_length if is_known else None
        is_keyed = self._shard is not None and self._shard.is_keyed
        return LoaderDescription(self._seed, length, self._limit, is_stream, pre_shard, is_keyed)

    @property
    def _seed(self) -> int | None:
        return None if self._shard is None else self._shard.order_seed

    @property
    def _sample_seed(self) -> int:
        """The seed from which those of single samples are derived: that of the order, if it has one."""
        seed = self._seed
        return self._progress.sample_seed if seed is None else seed

    @property
    def _plain_loader(self) -> PlainLoader:
        """The plain loader that would read on one process what this one reads with other ranks."""
        shard: Any = self._stream_shard() if self._shard is None else self._shard
        pre_shard, length = getattr(shard, "pre_shard", None), self._limit
        num_shards = pre_shard[1] if pre_shard else 1
        return PlainLoader(
            dataset=getattr(shard, "dataset", self.dataset),
            sampler=None if self._shard is None else self._shard.order_sampler,
            batch_size=self._plain_batch_size,
            batched=not self._unbatched,
            num_workers=self.num_workers,
            generator=self.generator,
            length=None if length is None else length // num_shards,
            drop_last=bool(shard.drop_last),
            num_shards=num_shards,
        )

    @property
    def _plain_batch_size(self) -> int:
        shard = self._stream_shard() if self._shard is None else self._shard
        return shard.batch_size or 1

    @property
    def _blocks_per_step(self) -> int:
        """Number of batches read from a stream per step."""
        return 1

    @property
    def _unbatched(self) -> bool:
        """Whether items of the dataset are yielded unbatched, with an unknown number of samples."""
        return self.batch_size is None and (self._shard is None or isinstance(self.sampler, Unbatched))

    def _install_shard(self) -> BatchSamplerShard:
        """Replace the iterated sampler by a shard, unless it already is one."""
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        iterated: Any = getattr(self, name)
        if isinstance(iterated, Unbatched):
            return iterated.shard
        if isinstance(iterated, BatchSamplerShard):
            shard = iterated
        elif name == "sampler" and not isinstance(iterated, BatchSampler):
            shard = self._make_shard(BatchSampler(iterated, 1, False), unbatched=True)
            # Bypass DataLoader.__setattr__, which raises for samplers and batch sizes after __init__.
            self.__dict__["sampler"] = Unbatched(shard)
            return shard
        else:
            shard = self._make_shard(iterated)
        # torch forbids setting these on a loader, and does not set them if it gets a batch sampler.
        self.__dict__[name] = shard
        if name == "batch_sampler":
            self.__dict__.update(batch_size=shard.local_batch_size, drop_last=shard.drop_last)
            self.__dict__["sampler"] = self.sampler if shard.sampler is None else shard.sampler
        return shard

    def _make_shard(self, batch_sampler: Any, unbatched: bool = False) -> BatchSamplerShard:
        return BatchSamplerShard(batch_sampler)

    def _set_inner_epoch(self, epoch: int) -> None:
        if not self._sets_epochs:
            return
        inner: Any
        for inner in (self._shard, self.dataset):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)

    def _stream_shard(self) -> IterableDatasetShard:
        """Return the shard of the stream of an iterable dataset."""
        # A shard with a different batch size is read like any other stream.
        if isinstance(self.dataset, IterableDatasetShard) and self.dataset.per_rank_batch == (
            self.batch_size or 1
        ):
            return self.dataset
        return IterableDatasetShard(
            self.dataset,  # type: ignore[arg-type]
            self.batch_size or 1,
            self.drop_last,
            even_batches=False,
        )

    def _stream(self, run: EpochRun, shard: IterableDatasetShard) -> Iterator[tuple[Any, StepRows | None]]:
        """Read (batch, step_rows) from an iterable dataset."""
        begin = run.begin
        place = begin.stream
        if self._reader is None or place is not None:  # persistent workers cannot seek to a position
            reader = BlockReader(shard, self.num_workers > 0, place, counts_rows=self.batch_size is None)
            collate = CollateBlock(self.collate_fn, batched=self.batch_size is not None)
            self._reader = DataLoader(
                reader, batch_size=None, **{**loader_settings(self), "collate_fn": collate}
            )
        num_shards = begin.part[1] if begin.part else 1
        start = begin.consumed // num_shards
        epoch = begin.epoch if self._sets_epochs else None
        comparison = self._comparison
        yields_first_sample = comparison is not None and not comparison.is_done
        self._reader.dataset.seek(epoch, start, place is not None, yields_first_sample)  # type: ignore[attr-defined]
        run.history = PositionHistory(place, self._blocks_per_step)
        # The readers start at a known position; without one they read again what was yielded before.
        num_skipped = 0 if place else start // shard.chunk
        return track_positions(self._open(self._reader, run), run, num_skipped, comparison)

    def _open(self, loader: DataLoader[Any], run: EpochRun) -> Iterator[Any]:
        """Start torch's iteration over this loader, or over the one that reads for it."""
        # Not this class's __iter__, which called this.
        iterate = DataLoader.__iter__ if loader is self else type(loader).__iter__
        key = epoch_key(self._sample_seed, run.begin.epoch)

        def begin() -> Iterator[Any]:
            with batched_reads(loader):
                return iterate(loader)

        reuses_workers = loader.persistent_workers and loader._iterator is not None
        start = partial(
            start_iteration, begin, run, loader.generator, loader.num_workers > 0 and not reuses_workers
        )
        return iterate_with_key(loader, start, key, self._workers_rank)


def pre_shard_of(shard: Any) -> tuple[int, int] | None:
    """Return (index, number) of the process for which data was sharded before; None if that does not matter.

    The order of a DistributedSampler is counted like any other order.
    """
    if isinstance(shard, PreshardedStream) or (
        isinstance(shard, PreshardedBatchSampler) and not shard.is_distributed_sampler
    ):
        return shard.pre_shard
    return None


class Unbatched(Sampler[Any]):
    """The entries of a shard with one index per batch, for unbatched loaders.

    Args:
        shard: The shard.
    """

    def __init__(self, shard: BatchSamplerShard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return (entry for (entry,) in self.shard)

    def __len__(self) -> int:
        return len(self.shard)


def unwrap_shards(batch_sampler: Any) -> Any:
    """Return the batch sampler inside the wrappers of this package."""
    while isinstance(batch_sampler, (BatchSamplerShard, SkipBatchSampler)):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments for another DataLoader with the settings of this one, except for sampling."""
    names = _SETTINGS + (_WORKER_SETTINGS if loader.num_workers else ())
    return {name: getattr(loader, name) for name in names}


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the innermost sampler of a loader, prepared or not.

    Args:
        dataloader: The loader.

    Returns:
        The sampler of single indices; None if there is none: for an iterable dataset, and for a batch sampler
        that makes its batches itself.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return None
    source: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    if isinstance(source, Unbatched):
        source = source.shard
    elif dataloader.batch_sampler is None and not isinstance(source, BatchSampler):
        return source
    return getattr(unwrap_shards(source), "sampler", None)
