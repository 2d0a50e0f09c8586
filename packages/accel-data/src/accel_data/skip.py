"""Going on in the middle of an epoch: a loader without the first batches of another one."""

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
    """Make a loader without the first batches of another one, which it does not read where it need not.

    After `load_state_dict` these are the first batches of the interrupted epoch, not further ones: the loader
    goes on where the state says. They are counted in batches of the run that was saved; where that had
    another number of processes, the number of batches of this run up to the loaded place means it as well.
    The loaders count epochs together: what comes after the new one's pass is the next epoch of either.

    Args:
        dataloader: The loader, prepared or not; or an object that wraps one and has a method
            `skip_first_batches(num_batches)`.
        num_batches: Number of batches to leave out.

    Returns:
        The new loader, with all settings of the given one. Where more is skipped than there is, its pass is
        empty, and a warning says so.

    Raises:
        TypeError: If num_batches is not an integer, or dataloader nothing that batches can be skipped of.
        ValueError: If it is negative.
    """
    check_skip(num_batches)
    if not isinstance(dataloader, DataLoader):
        return _skip_wrapped(dataloader, num_batches)
    if isinstance(dataloader, DataLoaderAdapter):
        # A shallow copy shares the progress: the epochs of both are counted together.
        skipped = copy.copy(dataloader)
        skipped.skip_batches = dataloader.skip_batches + num_batches
        return skipped
    # A stream can only be read from the front, and the loader that does so has to count.
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
    """Skip batches of what wraps a prepared loader, and alone knows what its batches are."""
    if not hasattr(loader, "skip_first_batches"):
        raise TypeError(
            f"skip_first_batches takes a DataLoader, prepared or not, but got a {type(loader).__name__}."
        )
    return loader.skip_first_batches(num_batches)


def _check_skip_fits(loader: DataLoader[Any], num_batches: int) -> None:
    """Warn if more batches are skipped than a loader has that will not notice by itself."""
    try:
        length = len(loader)
    except TypeError:
        return
    if num_batches > length:
        warn(f"Nothing is left after skipping {num_batches} batches: the loader has {length}.")
