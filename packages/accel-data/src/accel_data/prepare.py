"""Makes a loader that shards its data over the processes of a run, from any torch DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.checks import (
    check_divisible,
    check_loader,
    check_order,
    check_rng_types,
    check_seed,
    check_single,
    has_custom_iter,
)
from accel_data.dispatch.loader import DataLoaderDispatcher
from accel_data.loader.base import Unbatched, loader_settings
from accel_data.loader.iteration import PreparedLoader
from accel_data.loader.shard import DataLoaderShard, SkipDataLoader
from accel_data.loader.uneven import UNEVEN_PRESHARDED, UNEVEN_SHARDS, UnevenLoaderMonitor
from accel_data.order.detect_sharding import ExistingSharding, detect_sharding
from accel_data.order.global_order import sampler_generator
from accel_data.order.mesh import DataParallelInfo, find_data_parallel_info
from accel_data.order.presharded_sampler import PreshardedBatchSampler
from accel_data.order.samplers import BatchSamplerShard
from accel_data.order.seeding import Seeding, walk_and_verify
from accel_data.order.wrapper import FirstBatches
from accel_data.stream.dataset import IterableDatasetShard, PreshardedStream
from accel_data.stream.first_sample import RankQueryWarning, SampleComparison
from accel_data.torchdata.stateful import as_torch_sampler, is_stateful
from accel_state.enums import RNGType
from accel_state.logging.warning import warn
from accel_state.process.gloo_threads import wait_for_gloo_threads_at_exit
from accel_state.process.state import current_process

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.gradient import GradientState


@dataclass(frozen=True)
class LoaderPlan:
    """How a loader is sharded."""

    dp: DataParallelInfo
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
    """Make a loader that yields this process's shard of the batches of a DataLoader.

    Over all processes each sample is seen once, in the order in which a single process would see it: the
    order is a function of seed, epoch and position, whatever the number of processes and workers. Every
    setting of the loader is kept.

    Args:
        dataloader: The loader. A prepared one is returned unchanged.
        device: Where `put_on_device` moves batches; this process's device by default.
        num_processes: Number of processes; those that run by default.
        process_index: Index of this process.
        split_batches: Split every batch over the processes, so that the global batch size stays that of the
            loader; without it each process gets full batches, and a step has `num_processes` times as many
            samples.
        put_on_device: Move batches to the device.
        rng_types: Random generators to synchronise with process 0 when an iteration begins: "torch", "cuda"
            or another device's name, and "generator", that of the sampler, batch sampler or iterable dataset.
            By default only "generator".
        dispatch_batches: Read only on process 0 and send batches from there. By default for iterable
            datasets, except for those already sharded, and streams of Hugging Face `datasets` with as many
            shards as processes: of these each process reads its own shard, unless True is passed.
        even_batches: Pad an incomplete last step, so that all processes get equally many samples: with
            samples from the start of the epoch or, if batches are split, of the step itself; `real_samples`
            says how many are real. Without it that step is split as evenly as possible, and if it has fewer
            samples than processes, the last processes get no batch.
        slice_fn_for_dispatch: Slices the shard of one process out of a dispatched batch; see
            `DataLoaderDispatcher`.
        use_seedable_sampler: Also replace a random sampler with a user's generator by one whose order is a
            function of seed and epoch.
        data_seed: Seed of a shuffled order; by default drawn from torch's generator on process 0.
        non_blocking: Do not wait for copies from pinned memory to the device.
        use_stateful_dataloader: Return an instance of torchdata's StatefulDataLoader, too. It can exchange
            states with an unprepared one (the extra `stateful` installs torchdata).
        torch_device_mesh: The device mesh of the processes; those that differ only along its axes tp, cp and
            sp get the same batches.
        data_ranks: The data-parallel rank of each process of the run, if there is no mesh: [0, 0, 1, 1] for
            two groups of two processes that work on the same batches.
        gradient_state: The state that is notified when iteration begins and ends; by default the newest.
        custom_classes: See `DataLoaderConfiguration`.
        order: How shuffled orders are made: "torch" with `torch.randperm`, "keyed" computed from a key
            without memory; by default keyed for datasets of at least 2**27 samples.
        presharded: Whether each process already has its own shard of the data, such as a dataset that uses
            its rank in `__iter__`: then each process reads all of its data. Datasets and samplers with
            attributes for rank and world size are detected without it.

    Returns:
        A `DataLoaderShard` or `DataLoaderDispatcher`.

    Raises:
        TypeError: If `dataloader` is not a DataLoader, or data_seed not an integer.
        ValueError: If the loader cannot be sharded as requested: an indivisible or unknown batch size, a
            dataset without a length, data that is already sharded for other processes, an unknown random
            generator or order.
    """
    if isinstance(dataloader, PreparedLoader):
        return _check_prepared(dataloader)
    check_loader(dataloader)
    check_seed(data_seed)
    check_order(order)
    types = check_rng_types(rng_types)
    # First: the collectives from here on need the same order on all ranks.
    dp = find_data_parallel_info(num_processes, process_index, torch_device_mesh, data_ranks)
    if dp.is_distributed:
        wait_for_gloo_threads_at_exit()  # in a script that made its own process group nothing else may do it
    seeding = Seeding(use_seedable_sampler, data_seed, dp.is_distributed, gradient_state, order)
    plan = LoaderPlan(dp, split_batches, even_batches, seeding)
    # A collective: if the ranks have different loaders, all of them raise here, and none hangs later.
    dataset = dataloader.dataset
    existing = detect_sharding(dataloader, dp, compare=not dispatch_batches, presharded=presharded)
    if dispatch_batches is None:
        dispatch_batches = isinstance(dataset, IterableDataset) and existing is None
    if existing is not None:
        _check_existing_sharding(existing, plan, dispatch_batches)
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        warn("slice_fn_for_dispatch is ignored without dispatch_batches=True.")
    if put_on_device and device is None:
        device = current_process().device
    common = {
        "device": device if put_on_device else None,
        "rng_types": types if dp.is_distributed else None,
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
        prepared = _shard(shard, dataloader, plan, existing, common)
    # Monitors are numbered per process group, so all ranks must create them for the same loader.
    if existing is not None and dp.all_ranks_prepare and _may_differ(prepared):
        reason_and_fix = UNEVEN_PRESHARDED if existing.shard is None else UNEVEN_SHARDS
        prepared.set_uneven_monitor(UnevenLoaderMonitor(*reason_and_fix))
    is_shared_stream = isinstance(dataset, IterableDataset) and not isinstance(
        prepared.dataset, PreshardedStream
    )
    if isinstance(dataset, IterableDataset) and dp.all_ranks_prepare:
        _compare_first_samples(prepared, dataset, dp, is_shared_stream and existing is None, presharded)
    # All ranks read the full stream, in an order that may be drawn in the workers: same seeds there.
    if not is_shared_stream and not dispatch_batches:
        prepared.set_workers_rank(dp.rank)
    # After the seed of the order: both are broadcasts, in the same order on all ranks.
    if prepared._seed is None:
        prepared.set_sample_seed(seeding.sample_seed_root())
    return prepared


def _compare_first_samples(
    prepared: PreparedLoader,
    dataset: IterableDataset[Any],
    dp: DataParallelInfo,
    reads_full_stream: bool,
    presharded: bool,
) -> None:
    """Make the ranks compare their first samples of a stream if it may be sharded unexpectedly."""
    name = type(dataset).__name__
    if reads_full_stream:
        is_dispatched = isinstance(prepared, DataLoaderDispatcher)
        prepared.set_comparison(RankQueryWarning(name) if is_dispatched else SampleComparison(name))
    elif presharded and dp.size > 1:
        prepared.set_comparison(SampleComparison(name, presharded=True))


def _shard(
    cls: type[DataLoaderShard],
    dataloader: DataLoader[Any],
    plan: LoaderPlan,
    existing: ExistingSharding | None,
    common: dict[str, Any],
) -> DataLoaderShard:
    """Make a loader that reads its own shard."""
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        stream = _stream(dataset, dataloader, plan, existing)
        # torch gets the batch size of this rank, also if batches are split.
        per_rank_batch = None if dataloader.batch_size is None else stream.per_rank_batch
        generator = getattr(stream.dataset, "generator", None)
        common["synchronized_generator"] = generator if isinstance(generator, torch.Generator) else None
        return cls(stream, batch_size=per_rank_batch, drop_last=dataloader.drop_last, **common)
    batch_sampler, is_unbatched = _batch_sampler_of(dataloader, plan.seeding.data_seed)
    if isinstance(batch_sampler, BatchSamplerShard):
        shard = batch_sampler
    # A sampler that shards the order keeps it: its ranks already share a seed.
    elif existing is not None and not existing.of_dataset:
        shard = PreshardedBatchSampler(batch_sampler, existing.source, (existing.rank, existing.size))
    else:
        if is_unbatched and existing is None:
            check_single(batch_sampler.sampler, plan.dp.size, plan.even_batches)
        seedable, seed = plan.seeding.make_seedable(batch_sampler)
        common["synchronized_generator"] = sampler_generator(seedable)
        if existing is not None:
            pre_shard = existing.rank, existing.size
            shard = PreshardedBatchSampler(seedable, existing.source, pre_shard, existing.lengths, seed)
        else:
            size, rank, _ = plan.dp
            split_batches = plan.split_batches and not is_unbatched
            # An unknown sampler may draw from anything, so its order is compared between the ranks.
            verify = walk_and_verify if plan.dp.is_distributed else None
            shard = BatchSamplerShard(
                seedable,
                size,
                rank,
                split_batches,
                plan.even_batches,
                balance_last_step=True,
                seed=seed,
                verify=verify,
            )
    return cls(dataset, **_sampler_arguments(dataloader, shard, is_unbatched), **common)


def _stream(
    dataset: IterableDataset[Any],
    dataloader: DataLoader[Any],
    plan: LoaderPlan,
    existing: ExistingSharding | None,
) -> IterableDatasetShard:
    """Return the dataset that yields this rank's samples of an iterable dataset."""
    # The user's shard: it already has its rank and its padding.
    if isinstance(dataset, IterableDatasetShard):
        return dataset
    batch_size, drop_last = dataloader.batch_size, dataloader.drop_last
    if existing is not None:
        per_rank_batch = batch_size or 1
        if existing.shard is not None and plan.split_batches and batch_size is not None:
            check_divisible(batch_size, existing.size)
            per_rank_batch = batch_size // existing.size
        shard = dataset if existing.shard is None else existing.shard
        return PreshardedStream(shard, per_rank_batch, drop_last, (existing.rank, existing.size))
    size, rank, _ = plan.dp
    split_batches = plan.split_batches and batch_size is not None
    # A single process pads nothing, as a plain DataLoader.
    even = plan.even_batches and size > 1
    return IterableDatasetShard(
        dataset,
        batch_size or 1,
        drop_last,
        size,
        rank,
        split_batches,
        even_batches=even,
        balance_last_step=True,
    )


def _dispatcher(
    cls: type[DataLoaderDispatcher],
    dataloader: DataLoader[Any],
    plan: LoaderPlan,
    slice_fn: Callable[..., Any] | None,
    common: dict[str, Any],
) -> DataLoaderDispatcher:
    """Make a loader that gets its batches from process 0."""
    common |= {"split_batches": plan.split_batches, "even_batches": plan.even_batches, "slice_fn": slice_fn}
    # The data-parallel size, which with a mesh is not the world size.
    common["num_processes"] = plan.dp.size
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        return cls(dataset, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, **common)
    batch_sampler, is_unbatched = _batch_sampler_of(dataloader, plan.seeding.data_seed)
    seedable, seed = plan.seeding.make_seedable(batch_sampler)
    # An unbatched loader makes its own shard of single items (see `_install_shard`).
    sampling = _sampler_arguments(dataloader, seedable.sampler if is_unbatched else seedable, False)
    common["synchronized_generator"] = sampler_generator(seedable)
    return cls(dataset, order_seed=seed, **sampling, **common)


def _may_differ(loader: PreparedLoader) -> bool:
    """Whether ranks may have different numbers of batches without knowing those of the other ranks."""
    shard = loader._shard
    if shard is None:
        return isinstance(loader.dataset, PreshardedStream)
    return isinstance(shard, PreshardedBatchSampler) and not shard.is_even and shard.batches_per_rank is None


def _batch_sampler_of(dataloader: DataLoader[Any], data_seed: int | None = None) -> tuple[Any, bool]:
    """Return the batch sampler of a loader, and whether the loader is unbatched and it was made here."""
    batched = dataloader.batch_sampler is not None
    sampler = dataloader.batch_sampler if batched else dataloader.sampler
    # torchdata's samplers track their own position, which would be counted twice.
    sampler = as_torch_sampler(sampler, dataloader.generator, data_seed)
    number = _custom_length(dataloader)
    if number is not None and not _is_within(sampler, number):
        sampler = FirstBatches(sampler, number)
    if batched or isinstance(sampler, BatchSampler):
        return sampler, False
    return BatchSampler(sampler, 1, False), True


def _custom_length(dataloader: DataLoader[Any]) -> int | None:
    """Return the length of an epoch if the loader's class has its own __iter__ and __len__, else None."""
    if not has_custom_iter(dataloader) or type(dataloader).__len__ is DataLoader.__len__:
        return None
    try:
        return len(dataloader)
    except TypeError:
        return None


def _is_within(sampler: Any, number: int) -> bool:
    """Whether a sampler is known to end after at most so many entries."""
    return _is_finite(sampler) and len(sampler) <= number


def _is_finite(sampler: Any) -> bool:
    """Whether a sampler is known to be finite: one of a user's class, or one around it, may not be."""
    if isinstance(sampler, (list, tuple, range)):
        return True
    module = getattr(getattr(type(sampler), "__iter__", None), "__module__", "")
    inner = getattr(sampler, "sampler", None)
    return module.startswith(("torch.", "accel_data.")) and (inner is None or _is_finite(inner))


def _sampler_arguments(dataloader: DataLoader[Any], sampler: Any, is_unbatched: bool) -> dict[str, Any]:
    """Return the arguments that replace the sampler of a loader."""
    if dataloader.batch_sampler is not None:
        return {"batch_sampler": sampler}
    return {"batch_size": None, "sampler": Unbatched(sampler) if is_unbatched else sampler}


def _check_existing_sharding(existing: ExistingSharding, plan: LoaderPlan, dispatch_batches: bool) -> None:
    """Raise or warn if settings do not fit data that is already sharded."""
    name = type(existing.source).__name__
    if dispatch_batches:
        raise ValueError(
            f"The loader's data is already sharded, by its {name}, so with dispatch_batches=True process 0 "
            f"would send only its own shard. Leave it out, or pass dispatch_batches=False."
            f"{existing.rename_hint}"
        )
    is_accel_shard = existing.shard is not None or isinstance(
        existing.source, (BatchSamplerShard, IterableDatasetShard)
    )
    if plan.split_batches and plan.dp.size > 1 and not is_accel_shard:
        warn(
            f"split_batches=True is ignored: the {name} has already sharded the data, and the loader's batch "
            "size is that of one process.",
        )


def _check_prepared(loader: PreparedLoader) -> PreparedLoader:
    if isinstance(loader, SkipDataLoader):
        raise ValueError(
            "This loader skips the first batches of an unprepared loader, whose batches are not those of one "
            "process. Prepare that one first, then call skip_first_batches on the result."
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
    # torch's drop_last is False if a batch sampler was passed, whatever that one does.
    return dataloader.drop_last or bool(getattr(_batch_sampler_of(dataloader)[0], "drop_last", False))
