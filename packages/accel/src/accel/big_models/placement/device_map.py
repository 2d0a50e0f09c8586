"""Make a device map for a model and the available memory; check or shorten one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from accel.big_models.placement.layers import make_layout
from accel.big_models.placement.memory import get_max_memory, make_targets
from accel.big_models.placement.plan import ModelLayers, PlacementPlan, Target, make_plan
from accel_ops.module_sizes import Dtype
from accel_state.logging.warning import warn

Device = int | str | torch.device


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Choose a device for each part of a model: accelerators first, then the CPU, then the disk.

    Layers fill the devices in order. If layers are offloaded, the first accelerator in use keeps room for the
    largest of them, which runs there, and the CPU for the largest on the disk.
    `accel.big_models.placement.plan` has the rules.

    Args:
        model: The model; it may be on the meta device.
        max_memory: Bytes, or text such as "10GB", by device: a number for an accelerator, "cpu", "disk" ...
            By default the free memory of all; the disk has no limit unless it is listed.
        no_split_module_classes: Names of classes whose modules stay on one device, for example those with a
            residual connection.
        dtype: What weights will be converted to when they are loaded.
        special_dtypes: What single weights will be converted to, by their full names.
        verbose: Print where each layer goes.
        clean_result: Name a module instead of its submodules if all are on one device.
        offload_buffers: Offload the buffers of offloaded layers too. Otherwise they stay where these run,
            with a warning if they are larger than the room there.
        fallback_allocation: If an accelerator is too small for the next layer, place the first module that
            fits on it, level by level.

    Returns:
        Device by name of a module, or of a tensor that a module with children has itself.

    Raises:
        ValueError: If a device or a size is unknown, or `max_memory` limits the disk and the model does not
            fit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        >>> infer_auto_device_map(model, max_memory={0: 72, "cpu": 100})
        {'0': 0, '1': 'cpu'}
    """
    targets = make_targets(get_max_memory(max_memory))
    layout = make_layout(model, no_split_module_classes, dtype, special_dtypes)
    plan = make_plan(layout, targets, fallback_allocation)
    if verbose:
        _print_plan(layout, targets, plan)
    _warn_of_unused(layout, targets, plan, fallback_allocation)
    if not offload_buffers:
        _warn_of_buffers(layout, targets, plan)
    device_map: dict[str, Any] = {}
    for layer, index in zip(layout.layers, plan.targets, strict=True):
        device_map.update(dict.fromkeys(layer.names, targets[index].key))
    return clean_device_map(device_map) if clean_result else device_map


def _print_plan(layout: ModelLayers, targets: list[Target], plan: PlacementPlan) -> None:
    for layer, index in zip(layout.layers, plan.targets, strict=True):
        print(f"{', '.join(layer.names)} ({layer.size:.0f} bytes): {targets[index].key}")
    print(f"Room kept for offloaded layers: {plan.reserved:.0f} bytes where they run")


def _warn_of_unused(layout: ModelLayers, targets: list[Target], plan: PlacementPlan, fallback: bool) -> None:
    """Warn of accelerators without layers if layers are offloaded."""
    used = {targets[index].key for index in plan.targets}
    unused = [t for t in targets if t.kind == "accelerator" and t.key not in used and t.capacity > 0]
    # A model that fits on fewer devices may leave the others empty.
    if not unused or not used & {"cpu", "disk"}:
        return
    largest = max(layout.layers, key=lambda layer: layer.size)
    devices = ", ".join(f"{target.key} ({target.capacity:.0f} bytes)" for target in unused)
    hint = "" if fallback else " fallback_allocation=True looks for other layers that fit."
    warn(
        f"Layers are offloaded, and no layer is placed on the device {devices}: the next one does not fit "
        "in addition to the space reserved for offloaded layers. The largest is "
        f"{largest.names[0]} ({largest.size:.0f} bytes). Give more in max_memory, or fewer "
        f"no_split_module_classes.{hint}"
    )


def _warn_of_buffers(layout: ModelLayers, targets: list[Target], plan: PlacementPlan) -> None:
    """Warn of buffers of offloaded layers if no accelerator has room for them."""
    left = {index: target.capacity for index, target in enumerate(targets) if target.kind == "accelerator"}
    used = dict.fromkeys(left, 0.0)
    shared: dict[int, dict[int, float]] = {index: {} for index in left}  # a shared tensor counts once
    buffers = 0.0
    for layer, index in zip(layout.layers, plan.targets, strict=True):
        if index in used:
            used[index] += layer.size - sum(
                layer.shared[n] for n in layer.shared.keys() & shared[index].keys()
            )
            shared[index].update(layer.shared)
        else:
            buffers += layer.buffers
    if left and buffers and buffers > max(left[index] - used[index] for index in left):
        warn(
            f"The buffers of offloaded layers have {buffers:.0f} bytes and stay where these run, but no "
            "accelerator has as much left. Use offload_buffers=True to offload them too, or give more in "
            "max_memory."
        )


def check_device_map(model: torch.nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a device map covers a model; warn of names that the model does not have.

    Args:
        model: The model.
        device_map: Device by name of a module or tensor, "" for the full model.

    Raises:
        TypeError: If the map is not a mapping.
        ValueError: If a parameter or buffer has no device.
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(
            "device_map must be a dict of devices by name of a module, such as {'': 'cpu'}, not "
            f"{device_map!r}."
        )
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    names = {"", *tensors, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    unknown = [name for name in device_map if name not in names]
    surplus = ""
    if unknown:
        surplus = (
            f"device_map names {', '.join(map(repr, unknown))}, which {type(model).__name__} does not have. "
            f"Its modules: {', '.join(name for name, _ in model.named_children()) or 'none'}."
        )
    missing = [name for name in tensors if not _is_covered(name, device_map)]
    if missing:
        # A large model has thousands of names.
        shown = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise ValueError(
            f"device_map has no device for {shown}. Add their modules, or '' for all that is left. "
            f"{surplus}".rstrip()
        )
    if surplus:  # maps are often written for a family of models, some of which lack a module
        warn(surplus)


def _is_covered(name: str, device_map: Mapping[str, Device]) -> bool:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return name in device_map


def clean_device_map(device_map: Mapping[str, Device], module_name: str = "") -> dict[str, Any]:
    """Shorten a device map: one entry for a module whose submodules are all on one device.

    Args:
        device_map: Device by name of a module or tensor.
        module_name: Shorten only what is inside of this module; "" for all.

    Returns:
        A new map, in the order of the old one.

    Example:
        >>> clean_device_map({"a.x": 0, "a.y": 0, "b": 1})
        {'a': 0, 'b': 1}
    """
    children: dict[str, dict[str, None]] = {}
    for name in device_map:
        while name:
            parent = name.rpartition(".")[0]
            children.setdefault(parent, {})[name] = None
            name = parent
    cleaned: dict[str, Any] = {}

    def add(name: str) -> None:
        start = len(cleaned)
        if name in device_map:
            cleaned[name] = device_map[name]
        for child in children.get(name, ()):
            add(child)
        inside = f"{name}.".startswith(f"{module_name}.") or not module_name
        added = len(cleaned) - start
        if inside and added > 1:
            # Dicts keep their order: the newest entries are those of this module's submodules.
            entries = [cleaned.popitem() for _ in range(added)]
            if len({device for _, device in entries}) == 1:
                entries = [(name, entries[0][1])]
            cleaned.update(reversed(entries))

    add("")
    return cleaned
