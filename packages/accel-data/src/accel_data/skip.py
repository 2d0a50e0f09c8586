"""Continuing in the middle of an epoch: a loader without the first batches of another one."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accel_data.checks import check_skip
from accel_data.loader.base import DataLoaderAdapter, loader_settings
from accel_data.loader.shard import SkipDataLoader
from accel_data.order.skipping import SkipBatchSampler
from accel_data.torchdata.stateful import is_stateful, loader_class
from accel_state.logging.warning import warn


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Make a loader without the first batches of another one, which it does not read if it can seek.

    After `load_state_dict` these are the first batches of the interrupted epoch, not further ones: the loader
    continues where the state says. They are counted in batches of the saved run; if that had another number
    of processes, the number of batches that this run would need to reach the same position also works. The
    loaders share one epoch counter: after the new loader's iteration comes the next epoch of either.

    Args:
        dataloader: The loader, prepared or not; or an object that wraps one and has a method
            `skip_first_batches(num_batches)`.
        num_batches: Number of batches to skip.

    Returns:
        The new loader, with all settings of the original. If more is skipped than there is, its iteration is
        empty, with a warning.

    Raises:
        TypeError: If num_batches is not an integer, or batches of dataloader cannot be skipped.
        ValueError: If it is negative.
    """
    check_skip(num_batches)
    if not isinstance(dataloader, DataLoader):
        return _skip_wrapped(dataloader, num_batches)
    if isinstance(dataloader, DataLoaderAdapter):
        # A shallow copy shares the progress, and so the epoch counter.
        skipped = copy.copy(dataloader)
        skipped.skip_batches = dataloader.skip_batches + num_batches
        return skipped
    # A stream can only be read from its start, so the loader has to count.
    if isinstance(dataloader.dataset, IterableDataset):
        sampling: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        return SkipDataLoader(
            dataloader.dataset,
            num_batches,
            is_stateful(dataloader),
            **sampling,
            **loader_settings(dataloader),
        )
    _check_skip_fits(dataloader, num_batches)
    if dataloader.batch_sampler is None:
        sampling = {"batch_size": None, "sampler": SkipBatchSampler(dataloader.sampler, num_batches)}
    else:
        sampling = {"batch_sampler": SkipBatchSampler(dataloader.batch_sampler, num_batches)}
    return loader_class(is_stateful(dataloader))(
        dataloader.dataset, **sampling, **loader_settings(dataloader)
    )


def _skip_wrapped(loader: Any, num_batches: int) -> Any:
    """Skip batches of an object that wraps a prepared loader."""
    if not hasattr(loader, "skip_first_batches"):
        raise TypeError(
            f"skip_first_batches takes a DataLoader, prepared or not, but got a {type(loader).__name__}."
        )
    return loader.skip_first_batches(num_batches)


def _check_skip_fits(loader: DataLoader[Any], num_batches: int) -> None:
    """Warn if more batches are skipped than an unprepared loader has."""
    try:
        length = len(loader)
    except TypeError:
        return
    if num_batches > length:
        warn(f"Nothing is left after skipping {num_batches} batches: the loader has {length}.")
