"""Device maps that users request: by the name of a strategy, or as a map that must fit the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.tensors import Device, as_device
from accel.big_models.placement.device_map import infer_auto_device_map
from accel.big_models.placement.memory import STRATEGIES, get_balanced_memory
from accel_ops.module_sizes import Dtype

DeviceMap = Mapping[str, Device]


def make_device_map(
    model: nn.Module,
    strategy: str,
    max_memory: Any,
    no_split_module_classes: list[str] | None,
    dtype: str | torch.dtype | None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> dict[str, Any]:
    """Make a device map with a strategy.

    Args:
        model: The model.
        strategy: One of `STRATEGIES`.
        max_memory: As for `infer_auto_device_map`, like all arguments below.
        no_split_module_classes: Names of classes whose instances are not split.
        dtype: Dtype that weights will be converted to.
        offload_buffers: Whether buffers are offloaded too.
        special_dtypes: Dtypes that single weights will be converted to.

    Returns:
        Device by name of a module.

    Raises:
        ValueError: If there is no such strategy, or a device or size in `max_memory` is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"device_map must be a dict of devices by name of a module, or one of {', '.join(STRATEGIES)}, "
            f"not {strategy!r}."
        )
    # It fills each device as far as possible, and needs no limits.
    if strategy != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            special_dtypes=special_dtypes,
            low_zero=strategy == "balanced_low_0",
        )
    return infer_auto_device_map(
        model,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        offload_buffers=offload_buffers,
    )


def check_placement(model: nn.Module, device_map: DeviceMap, main_device: Device | None = None) -> None:
    """Check that a device map covers a model, and that its devices exist.

    Args:
        model: The model.
        device_map: The map.
        main_device: Where offloaded modules run, if the map does not determine it.

    Raises:
        TypeError: If the map is not a mapping.
        ValueError: If it leaves out a weight or names a device that does not exist.
    """
    # Libraries replace this name for a call (transformers, for parameters that the map leaves out).
    from accel import big_modeling

    big_modeling.check_device_map(model, device_map)
    wanted = {**device_map, "main_device": "cpu" if main_device is None else main_device}
    for name, device in wanted.items():
        if str(device) == "disk":
            continue
        try:
            # Nothing is allocated, and a missing device raises.
            torch.empty(0, device=as_device(device))
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            subject = "main_device is" if name == "main_device" else f"device_map puts {name!r} on"
            raise ValueError(
                f"{subject} {device!r}, which does not exist: {reason}. Name a device of this machine, "
                '"cpu" or "disk".'
            ) from error


def find_main_device(device_map: DeviceMap) -> torch.device:
    """Return where offloaded modules run: on the first device that is neither "cpu" nor "disk", or the CPU.

    Args:
        device_map: The map.
    """
    others = (device for device in device_map.values() if str(device) not in ("cpu", "disk"))
    return as_device(next(others, "cpu"))


def offloaded_kinds(main_device: torch.device) -> tuple[str, ...]:
    """Return the devices of a map whose weights are loaded for each forward, as the map names them.

    Args:
        main_device: Where they run.
    """
    # On these two, weights in CPU memory need no second copy: MPS shares it.
    return ("disk",) if main_device.type in ("cpu", "mps") else ("disk", "cpu")
