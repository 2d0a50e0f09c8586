"""Making a loader that shares its data out over the processes of a run, from any torch DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.checks import (
    check_divides,
    check_loader,
    check_order,
    check_rng_types,
    check_seed,
    check_single,
    has_own_iter,
)
from accel_data.dispatch.loader import DataLoaderDispatcher
from accel_data.loader.base import Unbatched, loader_settings
from accel_data.loader.iteration import PreparedLoader
from accel_data.loader.shard import DataLoaderShard, SkipDataLoader
from accel_data.loader.uneven import UNEVEN_PRESHARDED, UNEVEN_SHARDS, UnevenLoaderMonitor
from accel_data.order.detect_sharding import Split, split_everywhere
from accel_data.order.global_order import sampler_generator
from accel_data.order.mesh import Place, find_place
from accel_data.order.presharded_sampler import PresplitBatchSampler
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.seeding import Seeding, agreed_order
from accel_data.order.wrapper import FirstBatches
from accel_data.stream.dataset import IterableDatasetShard, PresplitStream
from accel_data.stream.first_sample import RankNotice, SampleComparison
from accel_data.torchdata.stateful import as_plain, is_stateful
from accel_state.enums import RNGType
from accel_state.logging.warning import warn
from accel_state.process.gloo_threads import wait_for_gloo_threads_at_exit
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.gradient import GradientState


@dataclass(frozen=True)
class LoaderPlan:
    """How a loader is shared out."""

    place: Place
    split_batches: bool
    even_batches: bool
    seeding: Seeding


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
    *,
    data_ranks: Sequence[int] | None = None,
    gradient_state: GradientState | None = None,
    custom_classes: Mapping[type, type] | None = None,
    order: Literal["torch", "keyed"] | None = None,
    presharded: bool = False,
) -> PreparedLoader:
    """Make a loader that gives this process its share of the batches of a DataLoader.

    All processes together see each sample once, in the order in which one process would: order is a function
    of seed, epoch and position, whatever the number of processes and workers. Every setting of the loader is
    kept.

    Args:
        dataloader: The loader. A prepared one is returned as it is.
        device: Where batches are put with `put_on_device`; this process's device by default.
        num_processes: Number of processes; those that run by default.
        process_index: Index of this one.
        split_batches: Give each process a piece of every batch, so that the batch size stays that of the
            loader; without it each process gets whole batches, and all together `num_processes` times as many
            samples.
        put_on_device: Put batches on the device.
        rng_types: Random generators to synchronise with process 0 when an iteration begins: "torch", "cuda"
            or another device's name, and "generator", the one that the sampler, batch sampler or iterable
            dataset has. Only that one by default.
        dispatch_batches: Read on process 0 alone and hand batches out from there. By default for iterable
            datasets, but for those that are divided already, and for streams of Hugging Face `datasets` with
            as many shards as there are processes: without True each process reads a shard of its own.
        even_batches: Complete an incomplete last step, so that all processes get equally many samples:
            with samples from the start, or where batches are split with samples of the step itself;
            `real_samples` says which they are. Without it that step is shared out as equally as can be,
            and if it has fewer samples than there are processes, the last ones get no batch.
        slice_fn_for_dispatch: Takes the part of one process out of a dispatched batch; see
            `DataLoaderDispatcher`.
        use_seedable_sampler: Also replace a random sampler that has a generator of the user's by one whose
            order is a function of seed and epoch.
        data_seed: Seed of a shuffled order; by default drawn from torch's generator on process 0.
        non_blocking: Do not wait for copies from pinned memory to the device.
        use_stateful_dataloader: Return an instance of torchdata's StatefulDataLoader, too, which exchanges
            states with one that is not prepared (the extra `stateful` installs it).
        torch_device_mesh: The mesh that the processes form; processes that differ only along its axes tp, cp
            and sp get the same batches.
        data_ranks: For each process of the run, which share of the data it gets, where no mesh says it:
            [0, 0, 1, 1] for two groups of two that work on the same batches.
        gradient_state: The state that is notified when iteration begins and ends; by default the newest.
        custom_classes: See `DataLoaderConfiguration`.
        order: How an order is made that is a function of seed and epoch: "torch" by `torch.randperm`, "keyed"
            computed from a key, in no memory; by default keyed for datasets of at least 2**27 samples.
        presharded: Whether each process has its own part of the data, as a dataset that asks for its rank in
            `__iter__`: then it reads all of it. Datasets and samplers that say so by their attributes need no
            setting.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`.

    Raises:
        TypeError: If `dataloader` is no DataLoader, or data_seed no integer.
        ValueError: If the loader cannot be shared out as asked: a batch size that does not divide or is not
            known, a dataset without a length, a loader that is shared out already, an unknown random
            generator, an unknown order.
    """
    if isinstance(dataloader, PreparedLoader):
        return _as_prepared(dataloader)
    check_loader(dataloader)
    check_seed(data_seed)
    check_order(order)
    types = check_rng_types(rng_types)
    # First of all: from here on processes exchange what they have, in the same order on all of them.
    place = find_place(num_processes, process_index, torch_device_mesh, data_ranks)
    if place.several:
        wait_for_gloo_threads_at_exit()  # a script with a group of its own may have nothing else that does it
    seeding = Seeding(use_seedable_sampler, data_seed, place.several, gradient_state, order)
    plan = LoaderPlan(place, split_batches, even_batches, seeding)
    # A collective: where the processes have different loaders, all of them raise here, and none hangs
    # later.
    dataset = dataloader.dataset
    split = split_everywhere(dataloader, place, compare=not dispatch_batches, presharded=presharded)
    if dispatch_batches is None:
        dispatch_batches = isinstance(dataset, IterableDataset) and split is None
    if split is not None:
        _check_split_fits(split, plan, dispatch_batches)
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        warn("slice_fn_for_dispatch is ignored without dispatch_batches=True.")
    if put_on_device and device is None:
        device = current_process().device
    common = {
        "device": device if put_on_device else None,
        "rng_types": types if place.several else None,
        "use_stateful_dataloader": use_stateful_dataloader or is_stateful(dataloader),
        "_drop_last": _drops_last(dataloader),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "gradient_state": gradient_state,
        **loader_settings(dataloader),
    }
    prepared: PreparedLoader
    if dispatch_batches:
        dispatcher = _class_for(DataLoaderDispatcher, custom_classes)
        common["data_ranks"] = data_ranks
        prepared = _dispatcher(dispatcher, dataloader, plan, slice_fn_for_dispatch, common)
    else:
        shard = _class_for(DataLoaderShard, custom_classes)
        prepared = _shard(shard, dataloader, plan, split, common)
    # Attendances are counted per process group, so that all processes make them at the same loader.
    if split is not None and place.together and _may_differ(prepared):
        prepared.set_uneven_monitor(
            UnevenLoaderMonitor(*(UNEVEN_PRESHARDED if split.part is None else UNEVEN_SHARDS))
        )
    is_shared_stream = isinstance(dataset, IterableDataset) and not isinstance(
        prepared.dataset, PresplitStream
    )
    if isinstance(dataset, IterableDataset) and place.together:
        _compare_first_samples(prepared, dataset, place, is_shared_stream and split is None, presharded)
    # All processes read such a stream whole, in an order that may be drawn in the workers.
    if not is_shared_stream and not dispatch_batches:
        prepared.set_workers_rank(place.rank)
    # After the seed of the order, as both are broadcasts, in one order on all processes.
    if prepared._seed is None:
        prepared.set_sample_seed(seeding.for_samples())
    return prepared


def _compare_first_samples(
    prepared: PreparedLoader, dataset: IterableDataset[Any], place: Place, is_whole: bool, presharded: bool
) -> None:
    """Have the processes compare their first samples of a stream, where these may not be as is thought."""
    name = type(dataset).__name__
    if is_whole:
        is_dispatched = isinstance(prepared, DataLoaderDispatcher)
        prepared.set_comparison(RankNotice(name) if is_dispatched else SampleComparison(name))
    elif presharded and place.size > 1:
        prepared.set_comparison(SampleComparison(name, presharded=True))


def _shard(
    cls: type[DataLoaderShard],
    dataloader: DataLoader[Any],
    plan: LoaderPlan,
    split: Split | None,
    common: dict[str, Any],
) -> DataLoaderShard:
    """Make the loader that reads its own share."""
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        stream = _stream(dataset, dataloader, plan, split)
        # The batch size that torch sees is that of this process, also where batches are split.
        share = None if dataloader.batch_size is None else stream.share
        generator = getattr(stream.dataset, "generator", None)
        common["synchronized_generator"] = generator if isinstance(generator, torch.Generator) else None
        return cls(stream, batch_size=share, drop_last=dataloader.drop_last, **common)
    iterated, single = _iterated(dataloader, plan.seeding.data_seed)
    if isinstance(iterated, BatchSamplerShard):
        shard = iterated
    # A sampler that divides the order keeps it: its processes have agreed about a seed already.
    elif split is not None and not split.of_dataset:
        shard = PresplitBatchSampler(iterated, split.holder, (split.rank, split.size))
    else:
        if single and split is None:
            check_single(iterated.sampler, plan.place.size, plan.even_batches)
        seeded, seed = plan.seeding.seeded(iterated)
        common["synchronized_generator"] = sampler_generator(seeded)
        if split is not None:
            part = split.rank, split.size
            shard = PresplitBatchSampler(seeded, split.holder, part, split.lengths, seed)
        else:
            size, rank, _ = plan.place
            split_batches = plan.split_batches and not single
            # An unknown sampler may draw from anything, so what it gives is compared between the processes.
            agreed = agreed_order if plan.place.several else None
            shard = BatchSamplerShard(
                seeded, size, rank, split_batches, plan.even_batches, spread=True, seed=seed, agreed=agreed
            )
    return cls(dataset, **_sampling(dataloader, shard, single), **common)


def _stream(
    dataset: IterableDataset[Any], dataloader: DataLoader[Any], plan: LoaderPlan, split: Split | None
) -> IterableDatasetShard:
    """Return what gives this process its samples of an iterable dataset."""
    # The user's own shard: it has its process and its padding already.
    if isinstance(dataset, IterableDatasetShard):
        return dataset
    batch_size, drop_last = dataloader.batch_size, dataloader.drop_last
    if split is not None:
        share = batch_size or 1
        if split.part is not None and plan.split_batches and batch_size is not None:
            check_divides(batch_size, split.size)
            share = batch_size // split.size
        part = dataset if split.part is None else split.part
        return PresplitStream(part, share, drop_last, (split.rank, split.size))
    size, rank, _ = plan.place
    pieces = plan.split_batches and batch_size is not None
    # On one process nothing is padded, as in a plain DataLoader.
    even = plan.even_batches and size > 1
    return IterableDatasetShard(
        dataset, batch_size or 1, drop_last, size, rank, pieces, even_batches=even, spread=True
    )


def _dispatcher(
    cls: type[DataLoaderDispatcher],
    dataloader: DataLoader[Any],
    plan: LoaderPlan,
    slice_fn: Callable[..., Any] | None,
    common: dict[str, Any],
) -> DataLoaderDispatcher:
    """Make the loader that gets its batches from process 0."""
    common |= {"split_batches": plan.split_batches, "even_batches": plan.even_batches, "slice_fn": slice_fn}
    # The number of data-parallel processes, which with a mesh is not that of the run.
    common["num_processes"] = plan.place.size
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        return cls(dataset, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **common)
    iterated, single = _iterated(dataloader, plan.seeding.data_seed)
    seeded, seed = plan.seeding.seeded(iterated)
    # A loader that does not batch deals out single items by itself (see `_install_shard`).
    sampling = _sampling(dataloader, seeded.sampler if single else seeded, False)
    common["synchronized_generator"] = sampler_generator(seeded)
    return cls(dataset, order_seed=seed, **sampling, **common)


def _may_differ(loader: PreparedLoader) -> bool:
    """Whether processes may have different numbers of batches, and do not know those of the others."""
    shard = loader._shard
    if shard is None:
        return isinstance(loader.dataset, PresplitStream)
    return isinstance(shard, PresplitBatchSampler) and not shard.is_even and shard.batches_of_each is None


def _iterated(dataloader: DataLoader[Any], data_seed: int | None = None) -> tuple[Any, bool]:
    """Return the batch sampler of a loader, and whether it was made here as the loader does not batch."""
    batched = dataloader.batch_sampler is not None
    sampler = dataloader.batch_sampler if batched else dataloader.sampler
    # torchdata's samplers remember a place of their own, which would be counted a second time.
    sampler = as_plain(sampler, dataloader.generator, data_seed)
    number = _own_length(dataloader)
    if number is not None and not _ends_within(sampler, number):
        sampler = FirstBatches(sampler, number)
    if batched or isinstance(sampler, BatchSampler):
        return sampler, False
    return BatchSampler(sampler, 1, False), True


def _own_length(dataloader: DataLoader[Any]) -> int | None:
    """Return the length of an epoch where the loader's class makes it by its own __iter__ and __len__."""
    if not has_own_iter(dataloader) or type(dataloader).__len__ is DataLoader.__len__:
        return None
    try:
        return len(dataloader)
    except TypeError:
        return None


def _ends_within(sampler: Any, number: int) -> bool:
    """Whether a sampler is known to end after so many entries."""
    return _has_end(sampler) and len(sampler) <= number


def _has_end(sampler: Any) -> bool:
    """Whether a sampler is known to end: one of another class, also inside of it, may go on without end."""
    if isinstance(sampler, (list, tuple, range)):
        return True
    module = getattr(getattr(type(sampler), "__iter__", None), "__module__", "")
    inner = getattr(sampler, "sampler", None)
    return module.startswith(("torch.", "accel_data.")) and (inner is None or _has_end(inner))


def _sampling(dataloader: DataLoader[Any], sampler: Any, single: bool) -> dict[str, Any]:
    """Return the arguments that put a sampler in place of the one that a loader iterates."""
    if dataloader.batch_sampler is not None:
        return {"batch_sampler": sampler}
    return {"batch_size": None, "sampler": Unbatched(sampler) if single else sampler}


def _check_split_fits(split: Split, plan: LoaderPlan, dispatch_batches: bool) -> None:
    """Raise or warn where settings do not fit data that is shared out already."""
    name = type(split.holder).__name__
    if dispatch_batches:
        raise ValueError(
            f"The loader shares its data out already, by its {name}, so with dispatch_batches=True process 0 "
            f"would hand out its own share only. Leave it out, or pass dispatch_batches=False.{split.rename}"
        )
    ours = split.part is not None or isinstance(split.holder, (BatchSamplerShard, IterableDatasetShard))
    if plan.split_batches and plan.place.size > 1 and not ours:
        warn(
            f"split_batches=True is ignored: the {name} has shared the data out already, and the loader's "
            "batch size is that of one process.",
        )


def _as_prepared(loader: PreparedLoader) -> PreparedLoader:
    if isinstance(loader, SkipDataLoader):
        raise ValueError(
            "A loader that skips its first batches was made from one that is not prepared, whose batches "
            "are not those of one process. Prepare that one first, then call skip_first_batches on the "
            "result."
        )
    return loader


def _class_for(base: type[Any], custom_classes: Mapping[type, type] | None) -> type[Any]:
    for key, cls in (custom_classes or {}).items():
        if key not in (DataLoaderShard, DataLoaderDispatcher) or not issubclass(cls, key):
            raise ValueError(
                f"custom_classes has {key!r}: {cls!r}, but keys must be DataLoaderShard or "
                "DataLoaderDispatcher, and each class a subclass of its key."
            )
    return (custom_classes or {}).get(base, base)


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    # torch's drop_last is False where a batch sampler was given, whatever that one does.
    return dataloader.drop_last or bool(getattr(_iterated(dataloader)[0], "drop_last", False))
