"""Attach hooks to the modules of a model that have weights, according to a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks.align import AlignDevicesHook
from accel.big_models.hooks.base import add_hook_to_module
from accel.big_models.hooks.tensors import Device, TiedParameters
from accel_ckpt.weights.offload import PrefixedDataset

# torch's own modules that use the weights of modules inside of them without calling these.
_PRELOADED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class _Options:
    """The options that the hooks of all modules of a model share; see `AlignDevicesHook`."""

    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: str | list[str] | None
    preload_module_classes: list[str] | None
    tied_params_map: TiedParameters | None

    def is_named(self, module: nn.Module) -> bool:
        return type(module).__name__ in (self.preload_module_classes or ())

    def preloads(self, module: nn.Module) -> bool:
        return isinstance(module, _PRELOADED) or self.is_named(module)

    def hook(
        self, device: Device | None, offload: bool = False, name: str = "", **more: Any
    ) -> AlignDevicesHook:
        weights = self.weights_map if offload else None
        if weights is not None and name:
            # A hook uses names inside of its module, but the map has those of the full model.
            weights = PrefixedDataset(weights, f"{name}.")
        return AlignDevicesHook(
            device,
            offload=offload,
            weights_map=weights,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied_params_map,
            **more,
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each module of a model that has its own weights.

    Args:
        module: The model, or a module in it.
        execution_device: Where forwards run.
        offload: Whether weights are on the device only while their module runs.
        weights_map: The offloaded weights by full name; by default they are kept on the CPU.
        offload_buffers: Offload buffers too.
        module_name: Name of `module` in `weights_map`.
        skip_keys: Keys whose values are not moved.
        preload_module_classes: Names of classes whose instances load the weights of all modules inside of
            them for their forward, as they use these without calling the modules. Those of torch that do so
            are known.
        tied_params_map: Copies of tied weights, as for `AlignDevicesHook`.

    Raises:
        ValueError: If a weight has no values.
    """
    options = _Options(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    _attach_where_weights_are(module, execution_device, offload, options, module_name, set())


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Attach a hook to each module that has weights, itself or inside, and no hook: its inputs are moved.

    Args:
        module: The model, or a module in it.
        execution_device: Where inputs, and the modules' own weights, are brought.
        skip_keys: Keys whose values are not moved.
        preload_module_classes: Names of classes inside of which no module gets a hook.
        tied_params_map: Copies of tied weights, as for `AlignDevicesHook`.
    """
    options = _Options(None, False, skip_keys, preload_module_classes, tied_params_map)
    _attach_to_resident(module, execution_device, options, {})


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Attach hooks to the blocks of a model, so that each runs on its device.

    Args:
        module: The model, or a module in it.
        execution_device: Device by name of a block, or one for all. The longest matching
            name applies; "" is the model.
        offload: Whether the weights of a block are offloaded, by name, or for all.
        weights_map: The offloaded weights by full name.
        offload_buffers: Offload buffers too.
        module_name: Name of `module` in the mappings.
        skip_keys: Keys whose values are not moved.
        preload_module_classes: As for `attach_align_device_hook`.
        tied_params_map: Copies of tied weights, as for `AlignDevicesHook`.

    Raises:
        ValueError: If a weight has no values; or the two mappings do not have the same names.
    """
    options = _Options(weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            _attach_where_weights_are(module, execution_device, True, options, module_name, set())
        else:
            hook = options.hook(execution_device, io_same_device=True, place_submodules=True)
            add_hook_to_module(module, hook)
        return
    devices, offloads = _by_name(execution_device, offload)
    _Blocks(devices, offloads, options).attach(module, module_name, None)


class _Blocks:
    """Walks down a model; each module is placed like the nearest named block around it."""

    def __init__(
        self, devices: Mapping[str, Device | None], offloads: Mapping[str, bool], options: _Options
    ) -> None:
        self.devices, self.offloads, self.options = devices, offloads, options
        self.seen: set[int] = set()
        self.weighty: dict[int, bool] = {}

    def attach(self, module: nn.Module, name: str, block: str | None) -> None:
        # A module under two names gets one hook.
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        is_block = name in self.offloads and name in self.devices
        block = name if is_block else block
        options, preload, hook = self.options, False, None
        # Outputs return to the device of the inputs. One hook for both: a second one would see inputs
        # that the first has moved.
        is_root = not name
        if block is not None:
            device, offload = self.devices[block], self.offloads[block]
            preload = options.preloads(module)
            if offload and (_has_direct_weights(module) or preload):
                hook = options.hook(device, True, name, place_submodules=preload, io_same_device=is_root)
            # A module without weights runs where its inputs are, and needs no hook.
            elif is_block or _has_weights(module, self.weighty):
                hook = options.hook(device, place_submodules=preload and not offload, io_same_device=is_root)
        if is_root and hook is None:
            hook = options.hook(self.devices.get(""), io_same_device=True)
        if hook is not None:
            add_hook_to_module(module, hook, append=True)
        # Else its own hook loads the weights of all modules inside it.
        if not preload:
            for child_name, child in module.named_children():
                self.attach(child, f"{name}.{child_name}" if name else child_name, block)


def _attach_where_weights_are(
    module: nn.Module, device: Device | None, offload: bool, options: _Options, name: str, seen: set[int]
) -> None:
    # One hook for a module with two names.
    if id(module) in seen:
        return
    seen.add(id(module))
    preload = offload and options.preloads(module)
    if preload or _has_direct_weights(module):
        add_hook_to_module(module, options.hook(device, offload, name, place_submodules=preload), append=True)
    if not preload:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            _attach_where_weights_are(child, device, offload, options, path, seen)


def _attach_to_resident(module: nn.Module, device: Device, options: _Options, cache: dict[int, bool]) -> None:
    if "_hf_hook" not in vars(module) and _has_weights(module, cache):
        add_hook_to_module(module, options.hook(device))
    if not options.is_named(module):
        for child in module.children():
            _attach_to_resident(child, device, options, cache)


def _has_direct_weights(module: nn.Module) -> bool:
    tables = (module._parameters, module._buffers)
    return any(value is not None for table in tables for value in table.values())


def _has_weights(module: nn.Module, cache: dict[int, bool]) -> bool:
    """Whether a module or one inside of it has weights; each is checked once."""
    if id(module) not in cache:
        inside = (_has_weights(child, cache) for child in module.children())
        cache[id(module)] = _has_direct_weights(module) or any(inside)
    return cache[id(module)]


def _by_name(
    device: Device | Mapping[str, Device] | None, offload: bool | Mapping[str, bool]
) -> tuple[Mapping[str, Device | None], Mapping[str, bool]]:
    if not isinstance(device, Mapping):
        assert isinstance(offload, Mapping)
        return dict.fromkeys(offload, device), offload
    if not isinstance(offload, Mapping):
        return device, dict.fromkeys(device, offload)
    if lacking := offload.keys() - device.keys():
        raise ValueError(f"offload has {', '.join(sorted(lacking))}, which execution_device lacks.")
    return device, offload
