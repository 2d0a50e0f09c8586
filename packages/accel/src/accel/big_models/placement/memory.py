"""The memory that a model may use: the free memory of each device, and limits for an even split."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from accel.big_models.placement.layers import make_layout
from accel.big_models.placement.plan import ModelLayers, Target, make_plan
from accel_ckpt.weights.files import convert_file_size_to_int
from accel_ops.module_sizes import Dtype
from accel_state.devices.table import DEVICES, detect

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""The values of `device_map` for which a map is made."""

_NAMED = ("mps", "cpu", "disk")

_logger = logging.getLogger(__name__)


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, float]:
    """Return the memory of each device in bytes, in the order in which a model fills them.

    Args:
        max_memory: Bytes, or text such as "10GB" or "1GiB", by device: a number for an accelerator, "mps",
            "cpu" or "disk". By default the free memory of each accelerator of this process and of the CPU.
            A limit of the disk alone, such as `{"disk": 0}` to never use it, keeps the defaults of the
            others. In a dict, text is replaced with bytes in place, which transformers relies on.

    Returns:
        Bytes by device: accelerators in the order of their numbers, "mps", "cpu", "disk".

    Raises:
        ValueError: If a device or a size is unknown.
    """
    if max_memory is None:
        return _free_memory()
    for device, size in max_memory.items():
        if not isinstance(device, int) and device not in _NAMED:
            raise ValueError(
                f"max_memory has the device {device!r}; allowed: numbers of accelerators, "
                f"{', '.join(map(repr, _NAMED))}."
            )
        if not isinstance(size, str) and not size >= 0:
            raise ValueError(f"max_memory[{device!r}] is {size}; a size is 0 bytes or more.")
    numbers = sorted(device for device in max_memory if isinstance(device, int))
    count = 0 if detect().type == "cpu" else detect().count()
    absent = [device for device in numbers if device >= count]
    if absent:
        # A plan for another machine is fine; placing a model with it would raise.
        _logger.warning(
            "max_memory has the devices %s, but this process sees %d accelerators.", absent, count
        )
    order: list[int | str] = [*numbers, *(name for name in _NAMED if name in max_memory)]
    sizes = {device: _bytes(max_memory[device]) for device in order}
    if sizes.keys() == {"disk"}:
        sizes = {**_free_memory(), **sizes}
    if isinstance(max_memory, dict):
        # transformers 5.23 compares the sizes in its mapping with the returned ones.
        max_memory.update(sizes)
    return sizes


def _bytes(size: float | str) -> float:
    return convert_file_size_to_int(size) if isinstance(size, str) else size


def _free_memory() -> dict[int | str, float]:
    found = detect()
    free: dict[int | str, float] = {}
    if found.type == "mps":
        free["mps"] = found.free_memory(0)
    elif found.type != "cpu":
        free.update((index, found.free_memory(index)) for index in range(found.count()))
    return {**free, "cpu": DEVICES["cpu"].free_memory(0)}


def make_targets(max_memory: Mapping[int | str, float]) -> list[Target]:
    """Return the devices that a plan fills, the disk last.

    Args:
        max_memory: What `get_max_memory` returned.
    """
    limits = max_memory if "disk" in max_memory else {**max_memory, "disk": math.inf}
    kinds = {"cpu": "cpu", "disk": "disk"}
    return [Target(device, size, kinds.get(str(device), "accelerator")) for device, size in limits.items()]


def get_balanced_memory(
    model: torch.nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, float]:
    """Return a `max_memory` with which `infer_auto_device_map` splits a model evenly over accelerators.

    Each accelerator but the last may take the smallest number of bytes with which the model fits on all of
    them; the last keeps its own limit. Nothing changes if there is only one, or if the model does not fit.

    Args:
        model: The model; it may be on the meta device.
        max_memory: As for `get_max_memory`.
        no_split_module_classes: As for `infer_auto_device_map`.
        dtype: As for `infer_auto_device_map`.
        special_dtypes: As for `infer_auto_device_map`.
        low_zero: Leave as much of the first accelerator free as the others allow, for other uses.

    Returns:
        Bytes by device.

    Raises:
        ValueError: If a device or a size is unknown.
    """
    memory = get_max_memory(max_memory)
    everywhere = [t for t in make_targets(memory) if t.kind == "accelerator" and t.capacity > 0]
    if len(everywhere) < 2:
        return memory
    layout = make_layout(model, no_split_module_classes, dtype, special_dtypes)
    if not _fits(layout, everywhere):
        return memory
    first: list[Target] = []
    spread = everywhere
    if low_zero:
        least = _smallest(layout, lambda size: [_limited(everywhere[0], size), *everywhere[1:]])
        first, spread = [_limited(everywhere[0], least)], everywhere[1:]
    even = _smallest(layout, lambda size: [*first, *(_limited(target, size) for target in spread)])
    # The last one keeps all of its room, for what cannot be split evenly.
    limits = {t.key: t.capacity for t in [*first, *(_limited(target, even) for target in spread[:-1])]}
    return {**memory, **limits}


def _limited(target: Target, size: float) -> Target:
    return replace(target, capacity=min(target.capacity, size))


def _fits(layout: ModelLayers, targets: Sequence[Target]) -> bool:
    """Whether a model fits on devices without being offloaded."""
    try:
        make_plan(layout, targets)
    except ValueError:
        return False
    return True


def _smallest(layout: ModelLayers, limited: Callable[[float], Sequence[Target]]) -> float:
    """Return the smallest number of bytes with which a model fits, to a thousandth of its size."""
    if _fits(layout, limited(0)):
        return 0
    total = sum(layer.size for layer in layout.layers)
    # It fits if each device has room for the full model, as it did without limits.
    low, high = 0, math.ceil(total)
    # To a thousandth: at most ten plans, where an exact answer would take one per bit.
    while high - low > max(1, total / 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(layout, limited(middle)) else (middle, high)
    return high
