"""Argument checks, with messages that name the value and the fix."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from accel_state.enums import RNGType
from accel_state.logging.warning import warn

_DEATH_S = 1.0  # how long to wait until torch reports that a worker has exited


def check_rank(num_processes: int, process_index: int) -> None:
    """Raise ValueError unless process_index is the rank of one of num_processes."""
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, but it is {num_processes}.")
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index must be at least 0 and below num_processes={num_processes}, but it is "
            f"{process_index}."
        )


def check_divisible(batch_size: int, num_processes: int) -> None:
    """Raise ValueError unless batches of batch_size can be split over num_processes."""
    if batch_size % num_processes:
        # The nearest valid sizes; for small batches there is none below.
        below = batch_size // num_processes * num_processes
        sizes = f"{below} or {below + num_processes}" if below else str(num_processes)
        raise ValueError(
            "split_batches=True needs a batch size that divides by the number of processes, but "
            f"{batch_size} does not divide by {num_processes}. Use a batch size of {sizes}, or "
            "split_batches=False."
        )


def check_skip(num_batches: int) -> int:
    """Return a number of batches to skip, or raise if it is invalid."""
    # bool is an int to isinstance, but True is not a number of batches.
    if not isinstance(num_batches, int) or isinstance(num_batches, bool):
        raise TypeError(f"The number of batches to skip must be an integer, but it is {num_batches!r}.")
    if num_batches < 0:
        raise ValueError(f"The number of batches to skip must be 0 or more, but it is {num_batches}.")
    return num_batches


def check_seed(data_seed: int | None) -> None:
    """Raise TypeError unless a seed is an integer or None."""
    if data_seed is not None and (not isinstance(data_seed, int) or isinstance(data_seed, bool)):
        raise TypeError(f"data_seed must be an integer or None, but it is {data_seed!r}.")


def check_order(order: str | None) -> None:
    """Raise ValueError unless an order is "torch", "keyed" or None."""
    if order not in ("torch", "keyed", None):
        raise ValueError(
            f"order must be 'torch', 'keyed' or None, but it is {order!r}. With None torch draws the order, "
            "unless the dataset is so large that it is computed from a key."
        )


def has_custom_iter(dataloader: DataLoader[Any]) -> bool:
    """Whether the loader's class has an __iter__ that is neither torch's nor torchdata's."""
    iterate = type(dataloader).__iter__
    # torchdata has one that tracks states, which a prepared loader does itself.
    return iterate is not DataLoader.__iter__ and not iterate.__module__.startswith("torchdata.")


def check_loader(dataloader: object) -> None:
    """Raise TypeError unless an object is a DataLoader; warn about what a prepared loader cannot preserve."""
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            "prepare_data_loader takes a torch.utils.data.DataLoader, but got a "
            f"{type(dataloader).__name__}: {dataloader!r:.100}."
        )
    if has_custom_iter(dataloader):
        warn(
            f"{type(dataloader).__name__} has its own __iter__, which the prepared loader does not use: it "
            "reads the same dataset with the same settings. Move what __iter__ does into the dataset or the "
            "collate_fn. If it keeps workers alive, pass persistent_workers=True instead.",
        )
    if not getattr(dataloader, "in_order", True) and dataloader.num_workers > 0:
        warn(
            "With in_order=False batches come in the order in which workers finish, so padding and resuming "
            "are not exact. Use in_order=True, or drop_last=True if only padding matters.",
        )


def check_rng_types(rng_types: Iterable[str | RNGType] | None) -> list[str | RNGType]:
    """Return the random generators to synchronise, "generator" by default, or raise if one is unknown."""
    if rng_types is None:
        return [RNGType.GENERATOR]
    # A single name is a string, which would be iterated letter by letter.
    return [RNGType(kind) for kind in ([rng_types] if isinstance(rng_types, str) else rng_types)]


def check_length(dataset: Any) -> None:
    """Raise ValueError unless a dataset has a length."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no __len__, which reading it by index needs. Add one, derive it "
            "from torch.utils.data.IterableDataset, or pass a sampler to the DataLoader."
        )


def check_single(sampler: Any, num_processes: int, even_batches: bool) -> None:
    """Raise ValueError if items of unknown size would have to be padded."""
    if num_processes == 1 or not even_batches:
        return
    length = len(sampler) if hasattr(sampler, "__len__") else None
    if length is None or length % num_processes:
        count = "unknown number of" if length is None else f"{length}"
        raise ValueError(
            f"The loader has batch_size=None, so its {count} items cannot be padded to equally many on each "
            f"of {num_processes} processes: the number of samples in an item is unknown. Pass "
            "even_batches=False or dispatch_batches=True."
        )


def explain_worker_error(error: Exception, num_workers: int) -> Exception:
    """Return an error that says that a worker died, if that is why a batch is missing.

    Args:
        error: The error raised while reading a batch.
        num_workers: Number of worker processes.

    Returns:
        The error to raise: `error` itself if it explains what happened.
    """
    # Raised by a broken pipe, a closed queue and missing shared memory.
    lost = isinstance(error, (ConnectionError, EOFError, FileNotFoundError))
    if not num_workers or not lost or "DataLoader worker" in str(error):
        return error
    until = time.monotonic() + _DEATH_S
    while time.monotonic() < until:
        try:  # torch knows more, unless its signal handler has already raised in the main thread
            signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]
        except RuntimeError as death:
            return death
        time.sleep(0.01)
    return RuntimeError(
        f"A DataLoader worker exited unexpectedly ({type(error).__name__}: {error}). It may have run out of "
        "memory. Use num_workers=0 to see an error where it happens."
    )
