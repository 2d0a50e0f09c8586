"""The base of every prepared loader: a torch DataLoader that knows its epoch, place and padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_data.loader.tensors import reading_batches_at_once
from accel_data.loader.workers import handed_on, opened
from accel_data.order.global_order import SeedableRandomSampler
from accel_data.order.layout import StepRows
from accel_data.order.mixing import mix_seed
from accel_data.order.presharded_sampler import PresplitBatchSampler
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.skipping import SkipBatchSampler
from accel_data.resume.cursor import Cursor, Kind, Pass, Progress, between_epochs, from_state, to_state
from accel_data.resume.stream_position import Trail
from accel_data.seeds import keyed, pass_key
from accel_data.stream.dataset import BlockReader, CollateBlock, IterableDatasetShard, PresplitStream
from accel_data.stream.first_sample import RankNotice, SampleComparison
from accel_data.torchdata.state import Plain, from_torchdata, is_from_torchdata, to_torchdata
from accel_data.torchdata.stateful import stateful_class

# Attributes of torch.utils.data.DataLoader that are also arguments of it; its sampling is replaced.
_KEPT = (
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
_KEPT_WITH_WORKERS = ("multiprocessing_context", "prefetch_factor")


class DataLoaderAdapter(DataLoader[Any]):
    """A torch DataLoader with a place: it knows its epoch, and how much of it has been handed out.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Be an instance of torchdata's StatefulDataLoader, too, and exchange states
            with it (the extra `stateful` installs it).
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
            # An instance of torchdata's class, whose own iteration is not used.
            self.__class__ = stateful_class(type(self))
            self.snapshot_every_n_steps = kwargs.pop("snapshot_every_n_steps", 1)
        # Not super(): torchdata's loader would put samplers of its own in.
        DataLoader.__init__(self, dataset, batch_sampler=batch_sampler, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.skip_batches = 0
        self._sets_epochs = True
        self.synchronized_generator: torch.Generator | None = None
        self._reads: DataLoader[Any] | None = None
        self._comparison: SampleComparison | RankNotice | None = None
        self._workers_rank = 0
        self._shard = None if isinstance(dataset, IterableDataset) else self._install_shard()
        self._progress = Progress(part=part_of(dataset if self._shard is None else self._shard))

    @property
    def iteration(self) -> int:
        """Number of the epoch that is being read, or comes next."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on where a loaded state says."""
        return self._progress.resumes

    @property
    def total_batch_size(self) -> int | None:
        """Samples of one step, all processes together; None where the batch size is not known."""
        if self._shard is None:
            return self._step_size if self.batch_size is not None else None
        return None if self._shard.batch_size is None else self._shard.step_size

    @property
    def total_dataset_length(self) -> int:
        """Length of the dataset, all processes together."""
        shard = self._shard
        if isinstance(shard, PresplitBatchSampler) and shard.lengths is not None:
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
        holder: Any = None if self._shard is None else innermost(self._shard)
        if not hasattr(holder, "sampler"):
            raise ValueError(f"This loader has no sampler that could be replaced by {sampler!r}.")
        # Where batches are cut from it; the shard outside sees it there.
        holder.sampler = sampler
        if self.batch_sampler is not None:
            self.__dict__["sampler"] = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it each iteration is the next epoch.

        Args:
            epoch: Its number, from 0.
        """
        self._progress.set_epoch(epoch)
        self._sets_epochs = True
        self._set_inner_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this loader: seed, epoch, and samples handed out by all processes together.

        Until the next iteration begins, an iteration that was left early is its place.
        """
        generator = self.synchronized_generator
        state = None if generator is None else generator.get_state()
        cursor = self._progress.cursor(self._step_size, state)
        place = to_state(cursor, self._kind, self._sample_seed)
        if self.use_stateful_dataloader:
            place |= to_torchdata(cursor, self._plain, pass_key(self._sample_seed, cursor.epoch))
        return place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a place: the next iteration has the rest of its epoch, on any number of processes.

        The state of an epoch's last batch is that of its end: the next iteration is the next epoch.

        Args:
            state_dict: What `state_dict` returned, maybe in another run; or that of torchdata's
                StatefulDataLoader, whose epoch is taken to be the one of this loader.

        Raises:
            ValueError: If it is not the state of a loader like this one over a dataset like this one.
        """
        cursor = self._cursor_of(state_dict)
        if not is_from_torchdata(state_dict):
            if self._shard is not None and self._seed is not None:
                self._shard.set_seed(int(state_dict["seed"]))
                # States of before there were keyed orders say nothing.
                self._shard.set_keyed(bool(state_dict.get("keyed", False)))
                drawn = isinstance(self._shard.walked, SeedableRandomSampler)
                if "keyed" not in state_dict and drawn and not cursor.ended and cursor.order is None:
                    # Their epochs were drawn from another seed; those that follow are drawn as now.
                    seed = mix_seed(int(state_dict["seed"]), cursor.epoch)
                    cursor = replace(cursor, order=torch.Generator().manual_seed(seed).get_state())
            self._progress.sample_seed = int(state_dict["sample_seed"])
        self._progress.resume(cursor)
        self._set_inner_epoch(self._progress.epoch)

    def set_workers_rank(self, rank: int) -> None:
        """Let workers draw other random numbers than those of processes that read other parts of the data.

        Args:
            rank: The part that this process reads.
        """
        self._workers_rank = rank

    def set_comparison(self, comparison: SampleComparison | RankNotice) -> None:
        """Choose what looks at the first sample of a stream.

        Args:
            comparison: See the class.
        """
        self._comparison = comparison

    def fitting_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what to load of a state that may be that of another dataset. Nothing is changed.

        Args:
            state_dict: As for `load_state_dict`.

        Returns:
            The state itself if it fits. Where it is that of another dataset at the start or the end of an
            epoch, the start of the next epoch, which has all samples of this one.

        Raises:
            ValueError: If it does not fit, in the middle of an epoch.
        """
        try:
            self._cursor_of(state_dict)
        except ValueError:
            place = between_epochs(state_dict)
            if place is None:
                raise
            state = to_state(replace(place, part=self._progress.part), self._kind, self._sample_seed)
            if None not in (state["seed"], state_dict["seed"]):
                state |= {"seed": state_dict["seed"], "keyed": state_dict.get("keyed", False)}
            return state
        return state_dict

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: a state counts what was handed out, never what was read ahead."""

    def __len__(self) -> int:
        return max(self._num_batches() - self.skip_batches, 0)

    # What follows is for the loaders of this package.

    def _num_batches(self) -> int:
        """Number of batches in an epoch, the skipped ones included."""
        return super().__len__()

    def _cursor_of(self, state_dict: Mapping[str, Any]) -> Cursor:
        if is_from_torchdata(state_dict):
            return from_torchdata(state_dict, self._plain, self._progress.epoch, self._progress.part)
        return from_state(state_dict, self._kind)

    @property
    def _step_size(self) -> int:
        """Places in the global order that one step of all processes takes."""
        if self._shard is not None:
            return self._shard.step_size
        return self._stream_shard().step_size

    @property
    def _limit(self) -> int | None:
        return None if self._shard is None else self._shard.num_samples

    @property
    def _kind(self) -> Kind:
        is_stream, part = self._shard is None, self._progress.part
        is_known = not is_stream and hasattr(self.dataset, "__len__")
        if part is not None and getattr(self._shard, "lengths", None) is None:
            is_known = False  # this part's length is not that of the others
        length = self.total_dataset_length if is_known else None
        is_keyed = self._shard is not None and self._shard.is_keyed
        return Kind(self._seed, length, self._limit, is_stream, part, is_keyed)

    @property
    def _seed(self) -> int | None:
        return None if self._shard is None else self._shard.order_seed

    @property
    def _sample_seed(self) -> int:
        """The seed that those of single samples are derived from: that of the order, if it has one."""
        seed = self._seed
        return self._progress.sample_seed if seed is None else seed

    @property
    def _plain(self) -> Plain:
        """The loader that would read on one process the samples that this one reads with others."""
        shard: Any = self._stream_shard() if self._shard is None else self._shard
        part, length = getattr(shard, "part", None), self._limit
        parts = part[1] if part else 1
        return Plain(
            dataset=getattr(shard, "dataset", self.dataset),
            sampler=None if self._shard is None else self._shard.walked,
            batch_size=self._plain_batch_size,
            batched=not self._unbatched,
            num_workers=self.num_workers,
            generator=self.generator,
            length=None if length is None else length // parts,
            drop_last=bool(shard.drop_last),
            parts=parts,
        )

    @property
    def _plain_batch_size(self) -> int:
        shard = self._stream_shard() if self._shard is None else self._shard
        return shard.batch_size or 1

    @property
    def _blocks_per_step(self) -> int:
        """How many batches that are read from a stream make a step."""
        return 1

    @property
    def _unbatched(self) -> bool:
        """Whether each item of the dataset goes out as it is, so that its number of samples is not known."""
        return self.batch_size is None and (self._shard is None or isinstance(self.sampler, Unbatched))

    def _install_shard(self) -> BatchSamplerShard:
        """Put a shard in place of the sampler that is iterated, unless it is one."""
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        iterated: Any = getattr(self, name)
        if isinstance(iterated, Unbatched):
            return iterated.shard
        if isinstance(iterated, BatchSamplerShard):
            shard = iterated
        elif name == "sampler" and not isinstance(iterated, BatchSampler):
            shard = self._make_shard(BatchSampler(iterated, 1, False), unbatched=True)
            # Past DataLoader.__setattr__, which raises for samplers and batch sizes once the loader is made.
            self.__dict__["sampler"] = Unbatched(shard)
            return shard
        else:
            shard = self._make_shard(iterated)
        # torch forbids to set these on a loader, and does not know them where it is given a batch sampler.
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
        """Return what shares out the stream of an iterable dataset."""
        # A shard with another batch size than the loader's is read like any other stream.
        if isinstance(self.dataset, IterableDatasetShard) and self.dataset.share == (self.batch_size or 1):
            return self.dataset
        return IterableDatasetShard(
            self.dataset,  # type: ignore[arg-type]
            self.batch_size or 1,
            self.drop_last,
            even_batches=False,
        )

    def _stream(self, started: Pass, shard: IterableDatasetShard) -> Iterator[tuple[Any, StepRows | None]]:
        """Read (batch, fill) from an iterable dataset."""
        begin = started.begin
        place = begin.stream
        if self._reads is None or place is not None:  # workers that live on do not know a place
            reader = BlockReader(shard, self.num_workers > 0, place, counts_rows=self.batch_size is None)
            collate = CollateBlock(self.collate_fn, batched=self.batch_size is not None)
            self._reads = DataLoader(
                reader, batch_size=None, **{**loader_settings(self), "collate_fn": collate}
            )
        parts = begin.part[1] if begin.part else 1
        start = begin.consumed // parts
        epoch = begin.epoch if self._sets_epochs else None
        comparison = self._comparison
        shows_first = comparison is not None and not comparison.is_done
        self._reads.dataset.seek(epoch, start, place is not None, shows_first)  # type: ignore[attr-defined]
        started.trail = Trail(place, self._blocks_per_step)
        # From a known place the readers begin there; without one they read again what was handed out
        # before.
        over = 0 if place else start // shard.chunk
        return handed_on(self._open(self._reads, started), started, over, comparison)

    def _open(self, loader: DataLoader[Any], started: Pass) -> Iterator[Any]:
        """Start torch's own iteration over this loader, or over the one that reads for it."""
        # Below this class's own __iter__, which called this.
        iterate = DataLoader.__iter__ if loader is self else type(loader).__iter__
        key = pass_key(self._sample_seed, started.begin.epoch)

        def begin() -> Iterator[Any]:
            with reading_batches_at_once(loader):
                return iterate(loader)

        live_on = loader.persistent_workers and loader._iterator is not None
        start = partial(opened, begin, started, loader.generator, loader.num_workers > 0 and not live_on)
        return keyed(loader, start, key, self._workers_rank)


def part_of(shard: Any) -> tuple[int, int] | None:
    """Return (index, number) of the process that data was divided for before; None if that does not matter.

    What a DistributedSampler deals out is counted like any other order.
    """
    if isinstance(shard, PresplitStream) or (isinstance(shard, PresplitBatchSampler) and not shard.deals):
        return shard.part
    return None


class Unbatched(Sampler[Any]):
    """The entries of a shard with one index per batch, for loaders that do not batch.

    Args:
        shard: The shard.
    """

    def __init__(self, shard: BatchSamplerShard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return (entry for (entry,) in self.shard)

    def __len__(self) -> int:
        return len(self.shard)


def innermost(batch_sampler: Any) -> Any:
    """Return the batch sampler inside of those of this package."""
    while isinstance(batch_sampler, (BatchSamplerShard, SkipBatchSampler)):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def loader_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that make another DataLoader with the settings of this one, sampling apart."""
    names = _KEPT + (_KEPT_WITH_WORKERS if loader.num_workers else ())
    return {name: getattr(loader, name) for name in names}


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the innermost sampler of a loader, prepared or not.

    Args:
        dataloader: The loader.

    Returns:
        The sampler that gives single indices; None if there is none: for an iterable dataset, and for a batch
        sampler that makes its batches by itself.
    """
    if isinstance(dataloader.dataset, IterableDataset):
        return None
    holder: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    if isinstance(holder, Unbatched):
        holder = holder.shard
    elif dataloader.batch_sampler is None and not isinstance(holder, BatchSampler):
        return holder
    return getattr(innermost(holder), "sampler", None)
