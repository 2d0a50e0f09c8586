"""Memory: releasing it, and finding the largest batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import platform
from collections.abc import Callable
from typing import Any

from accel_ops.signatures import signature
from accel_state.devices.table import device_spec
from accel_state.process.state import current_process

# What allocators and libraries say when memory does not suffice.
_OUT_OF_MEMORY = (
    "out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "DefaultCPUAllocator: can't allocate memory",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the memory that torch's allocator caches.

    Args:
        garbage_collection: Collect Python's garbage first, so that more is free.
    """
    if garbage_collection:
        gc.collect()
    device_spec(current_process().device).empty_cache()


def peak_memory() -> dict[str, int]:
    """Return the most memory that this process had, in bytes: of the host, and of tensors on its device."""
    peaks = {"host": 0, "device": device_spec(current_process().device).max_memory_allocated()}
    try:
        import resource
    except ImportError:  # Windows
        return peaks
    # macOS counts bytes, other systems KiB.
    unit = 1 if platform.system() == "Darwin" else 1024
    peaks["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peaks


def release_memory(*objects: Any) -> list[None]:
    """Drop references to objects, collect garbage and empty the device's cache.

    Args:
        *objects: The objects; assign the result to their names: `a, b = release_memory(a,
            b)`.

    Returns:
        As many times None.
    """
    count = len(objects)
    # The tuple would keep the objects alive while garbage is collected.
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error says that memory did not suffice.

    Args:
        exception: The error.
    """
    if not isinstance(exception, RuntimeError | MemoryError):
        return False
    # By the text: allocators of several devices raise a plain RuntimeError.
    return isinstance(exception, MemoryError) or any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is tried with smaller batch sizes until memory suffices.

    Args:
        function: Takes the batch size as its first argument; without it a decorator is returned.
        starting_batch_size: The first one that is tried.
        reduce_batch_size_fn: Called without arguments for the next one to try; by default the last one
            times 0.9, rounded down.

    Returns:
        The function without its first argument. Every call begins with the starting batch size.

    Raises:
        TypeError: By the call, if the function takes no batch size, or the call passes one itself.
        RuntimeError: By the call, if no batch size fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, model):
        ...     return batch_size
        >>> train("model")
        64
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    parameters = signature(function)
    wrapped = function

    @functools.wraps(wrapped)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Before the first try, so that a TypeError inside the function is not mistaken for this one.
        _check_call(wrapped.__name__, parameters, args, kwargs)
        batch_size = starting_batch_size
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return wrapped(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside of `except`: its traceback would keep the tensors of the failed call alive.
            clear_device_cache(garbage_collection=True)
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(batch_size * 0.9)
        raise RuntimeError(
            f"No executable batch size found for {wrapped.__name__}(): memory did not suffice from "
            f"{starting_batch_size} down to zero. Use a smaller model or shorter inputs."
        )

    return run


def _check_call(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} was called by find_executable_batch_size with the batch size before the "
            f"arguments given, which it does not take: {error}. Give {name}() the batch size as its first "
            "parameter, and leave it out of the call."
        ) from None
